"""Runs work that other threads post, queues requests as sequences, and assigns drafters to them."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection

from outrider.errors import OutriderError, Reason, invalid
from outrider.grammar.backends import Matcher
from outrider.lm.pages import KVSequence
from outrider.process.observability.telemetry import Span
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import Acceptance, SpeculationStats, TokenChunk, TokenRequest
from verifier_svc.engine.config import EngineConfig, LanguageModel
from verifier_svc.engine.context import EngineContext
from verifier_svc.state.sequence import Sequence


class Inbox:
    """Work that other threads post to the engine's thread, in order.

    Any thread may call `post` and `stop`; only the inbox's owner may call the other methods.
    """

    def __init__(self) -> None:
        self.stopped = False
        """True if the owner has reached a `stop` among the posted work."""
        self._work: deque[Callable[[], object]] = deque()
        self._posted = threading.Condition()

    def post(self, work: Callable[[], object]) -> None:
        """Have the owner run `work`."""
        with self._posted:
            self._work.append(work)
            self._posted.notify()

    def stop(self) -> None:
        """Have the owner stop after it has run the work posted so far."""
        self.post(self._stop)

    def _stop(self) -> None:
        self.stopped = True

    def run_all(self) -> None:
        """Run the work posted so far; an exception of the work goes to the caller.

        Work posted meanwhile waits for the next call, so that drafters whose messages arrive faster
        than the engine takes them cannot keep the engine from its next step.
        """
        for _ in range(len(self._work)):
            self._work.popleft()()

    def wait(self, seconds: float | None) -> None:
        """Sleep until there is work, for at most `seconds`; None sets no limit.

        Returns at once after a stop.
        """
        if seconds == 0.0 or self.stopped:
            return
        with self._posted:
            self._posted.wait_for(self._has_work, seconds)

    def _has_work(self) -> bool:
        return bool(self._work)


class Intake:
    """Checks and queues the requests of one engine, on its thread.

    `thinking_ids` are the tokens that begin and end the model's thinking phase, or None.
    """

    def __init__(
        self,
        context: EngineContext,
        model: LanguageModel,
        config: EngineConfig,
        thinking_ids: tuple[int, int] | None,
    ) -> None:
        self._sequences = context.sequences
        self._scheduler = context.scheduler
        self._drafting = context.drafting
        self._outbox = context.outbox
        self._book = context.book
        self._clock = context.clock
        self._model = model
        self._config = config
        self._thinking_ids = thinking_ids

    def submit(
        self,
        request: TokenRequest,
        sink: Callable[[TokenChunk | OutriderError], None],
        span: Span,
        matcher: Matcher | None,
    ) -> Sequence:
        """Queue a request and admit the sequences that fit; raises as `Engine.submit` does."""
        self._check(request)
        sequence = new_sequence(
            self._book.new_id(),
            request,
            sink,
            span,
            self._model.eos_token_ids,
            self._config.draft_tokens_policy,
            self._clock(),
        )
        if matcher is not None:
            sequence.matcher = matcher
            sequence.mask_width = -(-self._model.vocab_size // 32)
        check_committed(sequence)
        self._make_room(request)
        self._sequences[sequence.id] = sequence
        self._scheduler.add(sequence)
        self.admit()
        return sequence

    def admit(self) -> None:
        """Move sequences from the queue into the batch while they fit, and assign drafters."""
        for sequence in self._scheduler.admit():
            self._drafting.assign(sequence)

    def _check(self, request: TokenRequest) -> None:
        needed = len(request.prompt) + request.max_tokens
        pool = self._scheduler.pool
        held = pool.page_count * pool.page_size
        if needed > held:
            field = "max_tokens"
            message = f"prompt and max_tokens make {needed} tokens, but the KV cache holds {held}"
            raise OutriderError(Reason.CONTEXT_LENGTH_EXCEEDED, f"{field}: {message}", field)
        relaxed = request.speculation.acceptance is Acceptance.RELAXED
        if relaxed and self._thinking_ids is None:
            field = "speculation.acceptance"
            message = "relaxed is for the thinking phase, and the model has no tokens that mark one"
            raise OutriderError(Reason.INVALID_VALUE, f"{field}: {message}", field)
        if request.speculation.enabled and not request.committed:
            # A continued request may name a drafter that only its lost verifier had. The request
            # then goes on without that drafter.
            self._drafting.roster.check_known(request.speculation)

    def _make_room(self, request: TokenRequest) -> None:
        """Raise OVERLOADED if the queue is full and `FairQueue.to_displace` finds no sequence.

        If it finds a sequence of another tenant, that sequence ends with OVERLOADED instead.
        """
        waiting = self._scheduler.waiting
        try:
            self._book.check_room(len(waiting), request, self._scheduler.load_meter.load)
        except OutriderError as error:
            displaced = waiting.to_displace(request.tenant)
            if displaced is None:
                raise
            del self._sequences[displaced.id]
            self._scheduler.remove(displaced)
            self._outbox.add(displaced.sink, error)


def new_sequence(
    number: int,
    request: TokenRequest,
    sink: Callable[[TokenChunk | OutriderError], None],
    span: Span,
    eos_token_ids: Collection[int],
    policy: DraftTokensPolicy,
    now: float,
) -> Sequence:
    """Make sequence `number` for a request that arrived at `now`.

    `policy` bounds its drafts, unless the request does.
    """
    depth = request.speculation.draft_tokens
    if depth is None:
        depth = policy.max_draft_tokens
    if not request.speculation.enabled or request.max_tokens <= 1:
        depth = 0  # the last token is always the target's own, so a single token has no draft
    seed = request.sampling.seed
    if seed is None:
        seed = request.noise_seed
    if seed is None:
        seed = secrets.randbits(64)
    unscored = range(0)
    if request.prompt_logprobs is not None:
        # No logits precede the first token, so it has no log probability.
        unscored = range(1, len(request.prompt))
    end_ids = request.stop_token_ids
    if not request.ignore_eos:
        end_ids |= frozenset(eos_token_ids)
    return Sequence(
        id=number,
        arrival=number,
        request=request,
        seed=seed,
        max_draft_tokens=depth,
        end_ids=end_ids,
        kv=KVSequence(),
        sink=sink,
        tokens=[*request.prompt, *request.committed],
        stats=SpeculationStats(max_draft_tokens=depth),
        unscored=unscored,
        span=span,
        submitted_at=now,
    )


def check_committed(sequence: Sequence) -> None:
    """Raise OutriderError(INVALID_VALUE) if the request's committed tokens hold an end token."""
    committed = sequence.request.committed
    if sequence.end_ids.isdisjoint(committed):
        return
    i = next(i for i, token in enumerate(committed) if token in sequence.end_ids)
    message = f"must not end the sequence, but {committed[i]} does"
    raise invalid(f"committed_token_ids[{i}]", message)
