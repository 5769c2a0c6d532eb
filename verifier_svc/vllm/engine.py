"""vLLM in the verifier's process: our gateway's requests, vLLM's steps, our drafts.

`VllmEngine` stands where `verifier_svc.engine.loop.Engine` does; see `served.ServedEngine`. It runs
on the engine's thread.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.errors import OutriderError, Reason
from outrider.grammar.backends import TextMatcher
from outrider.process.clock import Clock
from outrider.process.observability.telemetry import NO_SPAN, Span
from outrider.protocol.messages import (
    FinishReason,
    SpeculationOptions,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    TokenSource,
)
from outrider.protocol.model_info import Load
from verifier_svc.drafts.exchange import DraftExchange
from verifier_svc.engine.intake import check_committed
from verifier_svc.state.sequence import Sequence
from verifier_svc.vllm import parameters
from verifier_svc.vllm.hub import DraftHub, Judged

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

log = logging.getLogger(__name__)

# After this many seconds no further batch size is tried: 1 comes first, then the largest, then 4, 8
# and so on. With a large model, some sizes may be left out.
_TRIALS_S = 10.0
_TRIAL_PROMPT = 16
# The number of steps in a trial; the fastest counts.
_TRIAL_STEPS = 3
# vLLM is asked for a step at this interval while its requests wait for their grammars.
_STALL_S = 0.001


class VllmEngine:
    """Owns vLLM's engine and the sequences in it.

    Other threads may call only `post`, `stop` and `clock`.
    """

    def __init__(self, llm: LLMEngine, hub: DraftHub, eos_token_ids: SequenceOf[int]) -> None:
        self._llm = llm
        self._hub = hub
        self._eos_token_ids = tuple(eos_token_ids)
        # Maps vLLM's name of a request to its sequence, and a sequence id to that name.
        self._sequences: dict[str, Sequence] = {}
        self._names: dict[int, str] = {}
        self._name_count = 0

    @property
    def drafting(self) -> DraftExchange:
        """The engine's side of all draft streams."""
        return self._hub.drafting

    @property
    def clock(self) -> Clock:
        """The engine's clock."""
        return self._hub.clock

    def load(self) -> Load:
        """Return how busy the engine is."""
        return self._hub.load()

    # --- from other threads ---

    def post(self, work: Callable[[], object]) -> None:
        """Have the engine's thread run `work` between two steps, or while a step waits."""
        self._hub.inbox.post(work)

    def stop(self) -> None:
        """Make `run` return after the step in progress and the work posted so far."""
        self._hub.inbox.stop()

    # --- requests ---

    def submit(
        self,
        request: TokenRequest,
        sink: Callable[[TokenChunk | OutriderError], None],
        span: Span = NO_SPAN,
        matcher: TextMatcher | None = None,
    ) -> Sequence:
        """Queue a request; its chunks, and any error, go to `sink`. vLLM compiles the grammar anew.

        Raises OutriderError: UNSUPPORTED_PARAMETER for what vLLM cannot do, OVERLOADED if the queue
        is full, DRAFTER_NOT_FOUND if it names an unknown drafter, INVALID_VALUE if vLLM refuses it
        or if its committed tokens hold an end token.
        """
        hub = self._hub
        parameters.check(request)
        if request.speculation.enabled and not request.committed:
            hub.drafting.roster.check_known(request.speculation)
        hub.book.check_room(len(hub.waiting), request, hub.load)
        sequence = hub.new_sequence(request, sink, span, self._eos_token_ids)
        try:
            check_committed(sequence)
            self._add(sequence, None if matcher is None else matcher.lark)
        except BaseException:
            self._drop(sequence)
            hub.forget(sequence)
            raise
        return sequence

    def _add(self, sequence: Sequence, lark: str | None = None) -> None:
        """Give a sequence to vLLM; raise OutriderError(INVALID_VALUE) if vLLM refuses it."""
        from vllm.exceptions import VLLMClientError

        self._name_count += 1
        name = str(self._name_count)
        prompt: Any = {"prompt_token_ids": list(sequence.tokens)}
        if sequence.request.tenant:
            # vLLM shares a cached prefix only between requests with the same salt.
            prompt["cache_salt"] = sequence.request.tenant
        self._sequences[name] = sequence
        self._names[sequence.id] = name
        try:
            self._llm.add_request(name, prompt, parameters.vllm_parameters(sequence, lark))
        except (ValueError, VLLMClientError) as error:
            message = f"vLLM refuses the request: {error}"
            raise OutriderError(Reason.INVALID_VALUE, message) from error

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence without a message to its client, and free its pages."""
        name = self._drop(sequence)
        if name is not None:
            self._llm.abort_request([name])
        self._hub.book.unread.pop(sequence.id, None)
        self._hub.forget(sequence)

    def _drop(self, sequence: Sequence) -> str | None:
        """Forget vLLM's name of a sequence, and return it."""
        name = self._names.pop(sequence.id, None)
        if name is not None:
            del self._sequences[name]
        return name

    def pause(self, sequence: Sequence) -> None:
        """Take a sequence out of vLLM until `resume`, because its caller does not read.

        A sequence with a grammar goes on, since vLLM could not resume it in the middle of the
        grammar. After the hub has failed, every sequence goes on, since pausing needs the hub. If
        more than `max_waiting` sequences are unread, one of them ends, see `SequenceBook.pause`.
        """
        if sequence.request.grammar is not None or self._hub.failed:
            return
        name = self._drop(sequence)
        if name is None:
            return
        # This precedes vLLM's message that the request is over, which would end the sequence for
        # the hub.
        self._hub.pause_sequence(sequence)
        self._llm.abort_request([name])
        book = self._hub.book
        overdue = book.pause(sequence)
        if overdue is not None:
            del book.unread[overdue.id]
            self._hub.outbox.add(overdue.sink, book.slow_reader)

    def resume(self, sequence: Sequence) -> None:
        """Let a sequence go on after `pause`, under a new id, from where it was."""
        hub = self._hub
        if not hub.book.resume(sequence):
            return
        sequence.admitted = False
        hub.sequences[sequence.id] = hub.waiting[sequence.id] = sequence
        try:
            self._add(sequence)
        except OutriderError as error:
            self._drop(sequence)
            hub.forget(sequence)
            hub.outbox.add(sequence.sink, error)

    def stop_coalescing(self) -> None:
        """Send clients all unsent tokens, and from now on the tokens of each step."""
        self._hub.book.stop_coalescing(self._sequences.values())

    # --- the loop ---

    def run(self) -> None:
        """Run steps until stopped; sleep while there is nothing to do."""
        inbox = self._hub.inbox
        try:
            while not inbox.stopped:
                inbox.run_all()
                self._hub.outbox.send_to_drafters()
                if self._llm.has_unfinished_requests():
                    self.step()
                else:
                    self._hub.go_idle()
                    inbox.wait(None)
        finally:
            # Clients get all committed tokens, even if an error ended the loop.
            self._hub.outbox.send_to_clients()

    def step(self) -> None:
        """Run one step of vLLM. Clients get its tokens when the next forward begins."""
        for output in self._llm.step():
            sequence = self._sequences.get(output.request_id)
            if sequence is not None:
                self._take(sequence, output)
        hub = self._hub
        if hub.failed or not self._llm.has_unfinished_requests():
            hub.outbox.send_to_clients()
        if hub.is_stalled:
            hub.inbox.wait(_STALL_S)

    def _take(self, sequence: Sequence, output: RequestOutput) -> None:
        """Send the client the tokens that a step committed to its sequence."""
        [completion] = output.outputs
        judged = self._hub.judged.get(sequence.id, Judged())
        reason = _finish_reason(completion.finish_reason) if output.finished else None
        if output.finished and reason is None:
            self._drop(sequence)
            message = f"vLLM ended the sequence: {completion.finish_reason}"
            self._hub.outbox.add(sequence.sink, OutriderError(Reason.INTERNAL, message))
            return
        if self._hub.failed:
            self._note(sequence, list(completion.token_ids), reason)
        if output.num_cached_tokens and sequence.stats.forward_count <= 1:
            sequence.cached_token_count = sequence.cached_token_count or output.num_cached_tokens
        chunk = _chunk(sequence, output, completion, judged, reason)
        if reason is not None:
            self._drop(sequence)
        self._hub.book.emit(sequence, chunk)

    def _note(self, sequence: Sequence, new: list[int], reason: FinishReason | None) -> None:
        """Record what a step committed to a sequence, in place of a hub that has failed."""
        sequence.tokens += new
        sequence.stats.record(0, 0)
        self._hub.waiting.pop(sequence.id, None)
        if reason is not None:
            self._hub.forget(sequence)

    # --- before the first request ---

    def warm_up(self) -> None:
        """Measure steps of several batch sizes and drafts, so that the first plan knows the costs.

        Without the measurements, the budget that bounds the harm of useless drafters would not be
        in force.
        """
        hub = self._hub
        self._try_logprobs()
        end = hub.clock() + _TRIALS_S
        most = hub.limits.max_sequences
        batches = dict.fromkeys([1, most, *(2**i for i in range(2, most.bit_length()))])
        for batch in batches:
            if batch > 1 and hub.clock() > end:
                continue
            self._try_batch(min(batch, most))

    def _try_logprobs(self) -> None:
        """Let vLLM compile its code for log probabilities, which takes up to half a minute."""
        request = TokenRequest([0] * 4, 2, ignore_eos=True, top_logprobs=1, prompt_logprobs=1)
        self._hub.trial_tokens = 0
        self.submit(request, _drop_chunk)
        while self._llm.has_unfinished_requests():
            self.step()
        self._hub.trial_tokens = None

    def _try_batch(self, batch: int) -> None:
        """Measure steps of `batch` sequences with none, some and all of the draft tokens."""
        hub = self._hub
        depth = self._llm.vllm_config.speculative_config.num_speculative_tokens
        counts = sorted({0, 1, depth // 2, depth})
        tokens = (1 + depth) * _TRIAL_STEPS * len(counts) + 1 + depth
        hub.trial_tokens = 0
        for _ in range(batch):
            prompt = [random.randrange(hub.limits.vocab_size) for _ in range(_TRIAL_PROMPT)]
            speculation = SpeculationOptions(draft_tokens=0)
            request = TokenRequest(prompt, tokens, ignore_eos=True, speculation=speculation)
            greedy = replace(request, sampling=replace(request.sampling, temperature=0.0))
            self.submit(greedy, _drop_chunk)
        while hub.waiting and not hub.failed:
            self.step()
        for count in counts:
            hub.trial_tokens = count
            seconds = min(self._trial_s() for _ in range(_TRIAL_STEPS))
            # A small cache may have preempted some sequences.
            if len(hub.running) == batch:
                for cost in (hub.cost, hub.isolated_cost):
                    cost.calibrate(batch, batch * (1 + count), seconds)
        for sequence in list(self._sequences.values()):
            self.cancel(sequence)
        hub.trial_tokens = None
        hub.go_idle()

    def _trial_s(self) -> float:
        began = self.clock()
        self.step()
        return self.clock() - began


def _chunk(
    sequence: Sequence,
    output: RequestOutput,
    completion: CompletionOutput,
    judged: Judged,
    reason: FinishReason | None,
) -> TokenChunk:
    new = list(completion.token_ids)
    sources = [TokenSource.ACCEPTED] * min(judged.accepted, len(new))
    if len(new) > len(sources):
        own = TokenSource.PLAIN
        if judged.drafted:
            accepted_all = judged.accepted == judged.drafted
            own = TokenSource.BONUS if accepted_all else TokenSource.RECOVERED
        sources += [own] * (len(new) - len(sources))
    assignment = judged.assignment
    scored = output.prompt_logprobs if sequence.request.prompt_logprobs is not None else None
    prompt = sequence.request.prompt
    return TokenChunk(
        token_ids=new,
        sources=sources,
        drafter_id=assignment.drafter.id if assignment is not None else "",
        finish_reason=reason,
        stats=sequence.stats if reason is not None else None,
        cached_token_count=sequence.cached_token_count,
        draft_token_count=judged.drafted,
        logprobs=_logprobs(completion.logprobs, new, sequence.request.top_logprobs),
        prompt_logprobs=_logprobs(
            scored and scored[1:], prompt[1:], sequence.request.prompt_logprobs
        ),
    )


def _logprobs(
    found: SequenceOf[Any] | None, token_ids: SequenceOf[int], most: int | None
) -> list[TokenLogprob]:
    """Return vLLM's log probabilities of tokens, with the `most` likeliest tokens of each place."""
    if not found or most is None:
        return []
    told = []
    for token_id, by_id in zip(token_ids, found, strict=False):
        own = by_id[token_id]
        top = sorted(by_id.items(), key=lambda each: each[1].rank)[:most]
        told.append(
            TokenLogprob(
                own.logprob,
                tuple(token for token, _ in top),
                tuple(each.logprob for _, each in top),
                own.rank or 0,
            )
        )
    return told


def _finish_reason(reason: str | None) -> FinishReason | None:
    """Return why a sequence ended; None for an end without an answer, such as an abort."""
    return {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}.get(reason or "")


def _drop_chunk(_: object) -> None:
    """Do nothing: nobody reads a trial's tokens."""
