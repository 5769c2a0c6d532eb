"""A client and its gateway in a simulated world.

The client sends a request and collects the tokens. If a verifier is lost, the gateway resumes the
request at another verifier.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from outrider.errors import OutriderError, Reason
from outrider.protocol.messages import (
    SpeculationOptions,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    TokenSource,
)
from outrider_bench.simulator.worlds.checked_verifier import CheckedVerifier
from outrider_bench.simulator.worlds.invariants import broken, compares
from outrider_bench.simulator.worlds.plan import RequestPlan
from outrider_bench.simulator.worlds.requests import answer_of, request_of
from outrider_bench.simulator.worlds.world import World
from verifier_svc.state.sequence import Sequence

_AGAIN_S = 0.05
_TOLERANCE = 1e-4
_SIDE = TokenSource.ACCEPTED_SIDE


class Client:
    """Sends one request, and keeps its tokens and outcome. The request must end exactly once."""

    def __init__(self, world: World, plan: RequestPlan) -> None:
        self.plan = plan
        self.end = ""
        """The way in which the request ended; empty before its end."""
        self.verifier: CheckedVerifier | None = None
        self._world = world
        self._received: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._answer = answer_of(plan.number)
        self._compares = compares(
            request_of(plan.number), sampled_drafts=world.plan.engine.sampled_drafts
        )
        self._drafter = (plan.drafter_id, plan.drafter_family)
        # The number of the latest attempt. The client ignores messages of earlier attempts.
        self._attempt = 0
        self._cancel: Callable[[], None] = lambda: None

    def ask(self) -> None:
        """Send the request, or its remaining part, to the verifier with the fewest requests."""
        if self.end:
            return
        before = self.verifier
        self._attempt += 1
        self.verifier = self._world.least_loaded(but=before)
        if self.verifier is None:
            self._world.events.after(_AGAIN_S, self.ask)
            return
        self._submit(self.verifier, self._rest())

    def _rest(self) -> TokenRequest:
        plan = self.plan
        request = request_of(plan.number)
        if not self._received:
            self._prompt_logprobs.clear()
        return replace(
            request,
            committed=[*self._received],
            tenant=plan.tenant,
            min_chunk_tokens=plan.min_chunk_tokens,
            speculation=SpeculationOptions(plan.speculates, *self._drafter, plan.draft_tokens),
            prompt_logprobs=None if self._received else request.prompt_logprobs,
        )

    def _submit(self, verifier: CheckedVerifier, request: TokenRequest) -> None:
        attempt = self._attempt
        events = self._world.events
        latency_s = self.plan.latency_s
        submitted: list[Sequence] = []
        verifier.open_requests += 1

        def receive(message: TokenChunk | OutriderError) -> None:
            if not isinstance(message, TokenChunk) or message.finish_reason is not None:
                verifier.open_requests -= 1
            events.after(latency_s, lambda: self._receive(attempt, verifier, message))

        def submit() -> None:
            try:
                submitted.append(verifier.submit(self.plan.number, request, receive))
            except OutriderError as error:
                receive(error)

        def cancel() -> None:
            for sequence in submitted:
                verifier.engine.cancel(sequence)

        self._cancel = lambda: verifier.post(cancel)
        events.after(latency_s, lambda: verifier.post(submit))

    # --- faults ---

    def leave(self) -> None:
        """Stop reading, like a client that hangs up or whose deadline has passed."""
        if not self.end and self._attempt:
            self._finish("left")
            self._world.events.after(self.plan.latency_s, self._cancel)

    def move(self, after_s: float) -> None:
        """Leave a verifier that does not answer, and resume at another.

        The first verifier learns of that after `after_s` seconds; until then both serve the
        request.
        """
        if not self.end and self.verifier is not None:
            self._world.counts["requests moved"] += 1
            self._world.events.after(after_s + self.plan.latency_s, self._cancel)
            self.ask()

    def lost(self, verifier: CheckedVerifier) -> None:
        """Resume at another verifier, because the present verifier has died."""
        if not self.end and self.verifier is verifier:
            self._world.counts["requests resumed"] += 1
            self.ask()

    # --- answers ---

    def _receive(
        self, attempt: int, verifier: CheckedVerifier, message: TokenChunk | OutriderError
    ) -> None:
        if attempt != self._attempt or self.end == "left":
            return
        self._world.counts["chunks"] += 1
        if self.end:
            broken("a request ends once", f"{self.plan.name} {self.end}, then {message}")
        if isinstance(message, OutriderError):
            self._fail(verifier, message)
        else:
            self._take(message)

    def _fail(self, verifier: CheckedVerifier, error: OutriderError) -> None:
        if error.reason is Reason.OVERLOADED:
            self._world.counts["requests refused, and asked again"] += 1
            self._world.events.after(_AGAIN_S, self._ask_again(self._attempt))
        elif error.reason is Reason.DRAFTER_NOT_FOUND and any(self._drafter):
            self._drafter = ("", "")
            self.ask()
        elif error.reason is Reason.INTERNAL and verifier.target.failed_count:
            verifier.target.failed_count -= 1
            self._finish("failed")
        else:
            broken("an error has a cause", f"{self.plan.name}: {error.reason.name}: {error}")

    def _ask_again(self, attempt: int) -> Callable[[], None]:
        def ask() -> None:
            if attempt == self._attempt:
                self.ask()

        return ask

    def _take(self, chunk: TokenChunk) -> None:
        name = self.plan.name
        self._received += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._prompt_logprobs += chunk.prompt_logprobs
        wanted = self._answer.token_ids
        count = len(self._received)
        self._world.counts["tokens"] += len(chunk.token_ids)
        self._world.counts["draft tokens accepted"] += chunk.accepted_count
        self._world.counts["accepted on branches"] += chunk.sources.count(_SIDE)
        self._world.note(f"{name} has {count}")
        if self._compares and self._received != wanted[:count]:
            broken("no token is missing, doubled or altered", f"{name}: {self._received}, {wanted}")
        if count > request_of(self.plan.number).max_tokens:
            broken("a text keeps to max_tokens", f"{name}: {count}")
        if len(chunk.sources) != len(chunk.token_ids):
            broken("each token has a source", chunk)
        if chunk.finish_reason is None:
            return
        if self._compares:
            if count != len(wanted) or chunk.finish_reason is not self._answer.finish_reason:
                broken("a text ends where the target ends it", f"{name}: {count} tokens")
            _check_logprobs(name, self._logprobs, self._answer.logprobs)
            _check_logprobs(name, self._prompt_logprobs, self._answer.prompt_logprobs)
        self._finish("finished")

    def _finish(self, end: str) -> None:
        self.end = end
        self._world.note(f"{self.plan.name} {end}")
        self._world.counts[f"requests {end}"] += 1


def _check_logprobs(name: str, given: list[TokenLogprob], wanted: list[TokenLogprob]) -> None:
    agrees = len(given) == len(wanted) and all(
        math.isclose(one.logprob, other.logprob, abs_tol=_TOLERANCE)
        for one, other in zip(given, wanted, strict=True)
    )
    if not agrees:
        broken("log probabilities are the target's own", f"{name}: {len(given)}, {len(wanted)}")
