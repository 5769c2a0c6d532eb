"""The verifier's server sees an engine as two interfaces: one for drafts, one for requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from outrider.errors import OutriderError
from outrider.grammar.backends import TextMatcher
from outrider.process.clock import Clock
from outrider.process.observability.telemetry import Span
from outrider.protocol.messages import TokenChunk, TokenRequest
from outrider.protocol.model_info import Load
from verifier_svc.drafts.exchange import DraftExchange
from verifier_svc.state.sequence import Sequence


class DraftingEngine(Protocol):
    """An engine on its thread, as drafters see it.

    Other threads may call only `post`, `stop` and `clock`.
    `verifier_svc.engine.loop.Engine` documents the methods.
    """

    @property
    def drafting(self) -> DraftExchange:
        """The engine's side of all draft streams."""

    @property
    def clock(self) -> Clock:
        """The engine's clock."""

    def post(self, work: Callable[[], object]) -> None:
        """Have the engine's thread run `work` between two steps."""

    def stop(self) -> None:
        """Make `run` return after the work posted so far."""

    def run(self) -> None:
        """Run steps until stopped."""

    def load(self) -> Load:
        """Return how busy the engine is."""


class ServedEngine(DraftingEngine, Protocol):
    """An engine that takes requests: Outrider's own, or vLLM's."""

    def submit(
        self,
        request: TokenRequest,
        sink: Callable[[TokenChunk | OutriderError], None],
        span: Span,
        matcher: TextMatcher | None,
    ) -> Sequence:
        """Queue a request; raise OutriderError if it is refused."""

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence without a message to its client."""

    def pause(self, sequence: Sequence) -> None:
        """Leave a sequence out of steps until `resume`."""

    def resume(self, sequence: Sequence) -> None:
        """Let a sequence go on after `pause`."""

    def stop_coalescing(self) -> None:
        """Send clients all unsent tokens, and from now on the tokens of each step."""
