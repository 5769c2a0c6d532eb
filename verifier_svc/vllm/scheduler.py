"""vLLM's scheduler with our drafts. Only this module uses the scheduler's private state.

vLLM loads it with `--scheduler-cls verifier_svc.vllm.scheduler.OutriderScheduler`. Both runners of
vLLM take a draft as `Request.spec_token_ids` and verify it in the next forward. A fault of our code
ends only the drafting: requests go on as without drafters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler

from outrider.errors import invalid
from outrider.process.observability.telemetry import NO_SPAN
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from verifier_svc.state.occupancy import Occupancy
from verifier_svc.vllm.hub import DraftHub
from verifier_svc.vllm.outcome import Outcome
from verifier_svc.vllm.own_drafter import OwnDrafter
from verifier_svc.vllm.parameters import sequence_id_of, strip
from verifier_svc.vllm.runner import own_method

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


class DraftingMixin(Scheduler):  # type: ignore[misc]  # vLLM may be missing where types are checked
    """Places drafts before each step, and tells a `DraftHub` afterwards what became of them.

    It overrides six methods of vLLM's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Like vLLM's scheduler. Raises OutriderError if drafts cannot be verified or placed."""
        super().__init__(*args, **kwargs)
        if self.vllm_config.parallel_config.pipeline_parallel_size > 1:
            message = (
                "must be 1: Outrider drafts for one step at a time, and with pipeline parallelism"
                " vLLM has a step in progress for each stage; use tensor parallelism"
            )
            raise invalid("pipeline_parallel_size", message)
        method = own_method(self.vllm_config)
        self._hub = self._make_hub()
        self._own_drafter: OwnDrafter | None = None
        if method is not None:
            with self._hub.turn:
                self._own_drafter = OwnDrafter(self._hub, method, self.num_spec_tokens)
        # A hybrid model has several groups of layers. For the same tokens, each group takes a page
        # of its own.
        self._page_groups = max(1, len(self.kv_cache_config.kv_cache_groups))
        self._drafts = True

    def _make_hub(self) -> DraftHub:
        """Return the hub of this scheduler. Raises OutriderError if the hub cannot be made."""
        raise NotImplementedError

    @contextmanager
    def _guarded(self) -> Iterator[DraftHub]:
        """Yield the hub for use. A fault of our code is logged and ends the drafting."""
        with self._hub.turn:
            try:
                yield self._hub
            except Exception:
                log.exception("drafting failed; requests go on without drafts")
                self._drafts = False
                self._hub.failed = True
                for request in self.running:
                    request.spec_token_ids = []
                self._hub.give_up()

    # --- requests ---

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        is_new = request.request_id not in self.requests
        if not self._hub.is_own and request.sampling_params is not None:
            strip(request.sampling_params)
        super().add_request(request)
        if is_new and self._drafts and _generates(request):
            with self._guarded() as hub:
                _open(hub, request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._drafts:
            with self._guarded() as hub:
                hub.close(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if self._drafts:
            with self._guarded() as hub:
                hub.preempted(request.request_id)
        super()._preempt_request(request, *args, **kwargs)

    # --- a step ---

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Choose the tokens of the next step, after a wait for the drafts that are worth it."""
        if self._drafts:
            with self._guarded() as hub:
                hub.plan_step((each.request_id, each.num_computed_tokens) for each in self.running)
                # Work that ran meanwhile may have added and ended requests.
                self._place(hub)
        output = super().schedule(*args, **kwargs)
        if self._drafts:
            with self._guarded() as hub:
                counts = output.num_scheduled_tokens
                # vLLM counts the step's tokens as computed already.
                computed = {
                    each: self.requests[each].num_computed_tokens - count
                    for each, count in counts.items()
                }
                hub.begin(counts, output.scheduled_spec_decode_tokens, computed)
        return output

    def _place(self, hub: DraftHub) -> None:
        """Give the decoding requests their drafts.

        vLLM would preempt a request to make room for a draft, so a draft gets only pages that are
        free when every request has the pages of its plain step.
        """
        spare = self._spare_pages()
        size = self.block_size
        for request in self.running:
            request.spec_token_ids = []
            if not _decodes(request):
                continue
            tokens = hub.choose(request.request_id, self._room(request))
            if not tokens:
                continue
            # vLLM checks no ids, and a wrong id would end its engine.
            if not all(type(each) is int and 0 <= each < hub.limits.vocab_size for each in tokens):
                hub.drop(request.request_id, tokens)
                continue
            tokens = self.structured_output_manager.validate_tokens(request, tokens)
            # vLLM's own drafter needs room for the tokens that it will guess.
            length = request.num_tokens + self.num_lookahead_tokens
            held = -(-length // size)
            wanted = -(-(length + len(tokens)) // size) - held
            if wanted > spare:
                tokens = tokens[: (held + spare) * size - length]
                wanted = spare
            spare -= wanted
            request.spec_token_ids = tokens

    def _spare_pages(self) -> int:
        """Return how many free pages each group of layers has beyond what plain steps need."""
        size = self.block_size
        groups = self._page_groups
        needed = 0
        for request in self.running:
            computed = request.num_computed_tokens
            end = min(request.num_tokens, computed + self.max_num_scheduled_tokens)
            ahead = self.num_lookahead_tokens
            needed += max(0, -(-(end + ahead) // size) - -(-(computed + ahead) // size))
        free = int(self.kv_cache_manager.block_pool.get_num_free_blocks())
        return max(0, free // groups - needed)

    def _room(self, request: Request) -> int:
        """Return how many draft tokens one step could commit, besides the target's own token."""
        left = request.max_tokens - request.num_output_tokens
        context = self.max_model_len - request.num_tokens
        return int(min(self.num_spec_tokens, left - 1, context - 1))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Commit a step's tokens, and judge its drafts."""
        if not self._drafts:
            return super().update_from_output(scheduler_output, model_runner_output)
        before = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                before.append((request, request.num_output_tokens))
        with self._guarded() as hub:
            hub.computed()
        result = super().update_from_output(scheduler_output, model_runner_output)
        if self._drafts:
            with self._guarded() as hub:
                outcomes = [self._outcome(scheduler_output, *each) for each in before]
                hub.commit(outcomes, self._occupancy(hub))
        return result

    def _outcome(self, output: SchedulerOutput, request: Request, had: int) -> Outcome:
        drafted = output.scheduled_spec_decode_tokens.get(request.request_id, [])
        if drafted and drafted[0] < 0:
            drafted = []  # a padded row
        return Outcome(request.request_id, list(drafted), list(request.output_token_ids[had:]))

    def _occupancy(self, hub: DraftHub) -> Occupancy:
        return Occupancy(
            running=len(self.running),
            waiting=len(self.waiting),
            pages=self.kv_cache_manager.usage,
            preemptions=hub.preemption_count,
        )

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take the drafts of vLLM's own drafter; do nothing if our stub is in its place."""
        own_drafter = self._own_drafter
        if own_drafter is None or not self._drafts:
            return
        pairs = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        # What vLLM guesses after a part of a prompt that is not the last part means nothing.
        found = [
            each
            for each in pairs
            if each[0] in self.requests and not self.requests[each[0]].is_prefill_chunk
        ]
        with self._guarded():
            own_drafter.take(found)


def _generates(request: Request) -> bool:
    """Return whether a request gets tokens, and has a prompt of tokens.

    A request for embeddings, or with a prompt of embeddings, has no drafters.
    """
    return request.sampling_params is not None and request.prompt_token_ids is not None


def _decodes(request: Request) -> bool:
    """True if the next step computes one token of a request and samples the next token."""
    return bool(
        request.num_tokens - request.num_computed_tokens == 1
        and not request.is_prefill_chunk
        and not request.num_in_flight_tokens
        and not request.num_output_placeholders
    )


def _open(hub: DraftHub, request: Request) -> None:
    """Tell the hub about a request; if our gateway did not send it, it gets a new sequence."""
    sequence = hub.sequences.get(sequence_id_of(request.sampling_params) or 0)
    if sequence is None:
        sequence = hub.new_sequence(_request_to_vllms_server(request), _drop, NO_SPAN, ())
    hub.open(request.request_id, sequence)


def _request_to_vllms_server(request: Request) -> TokenRequest:
    """Convert a request to vLLM's own server into a request for drafters.

    vLLM draws the request's tokens with vLLM's noise, so drafters are to guess the likeliest
    tokens.
    """
    return TokenRequest(
        prompt=list(request.prompt_token_ids),
        max_tokens=request.max_tokens,
        sampling=SamplingParams(temperature=0.0),
        speculation=SpeculationOptions(draft_tokens=None),
        tenant=request.cache_salt or "",
        request_id=request.request_id,
    )


def _drop(_: object) -> None:
    """Do nothing: vLLM's own server sends the tokens."""


class OutriderScheduler(DraftingMixin):
    """vLLM's scheduler with our drafts. It opens a port for drafters, see `plugin`."""

    def _make_hub(self) -> DraftHub:
        """Return the hub of our server's engine in this process, or of a new port for drafters."""
        from verifier_svc.vllm import plugin

        return plugin.hub_for(self.vllm_config)
