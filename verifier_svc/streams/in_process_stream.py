"""Connects a drafter in the verifier's process, with the same messages, but no gRPC and no copies.

`outrider.drafter.stream.DraftStream` connects to `InProcessVerifier`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.drafter.transport import StreamEnded
from outrider.errors import OutriderError
from outrider.protocol.draft_messages import DraftBatch, Hello, StepBatch, Welcome
from outrider.protocol.model_info import ModelInfo
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.engine.served import DraftingEngine
from verifier_svc.state.drafter import Drafter
from verifier_svc.streams.drafter_streams import check_tokenizer
from verifier_svc.streams.unread_steps import UnreadSteps

if TYPE_CHECKING:
    from outrider.lm.runner import ModelRunner


class InProcessVerifier:
    """The verifier in this process, as drafters reach it; see `outrider.drafter.transport`.

    Use it only on the verifier's event loop.
    """

    def __init__(self, engine: EngineThread[DraftingEngine], info: ModelInfo) -> None:
        """`engine` has started, and serves the model that `info` describes."""
        self._engine = engine
        self._info = info

    def address(self) -> str:
        """Return the name of this process as an address, for the log."""
        return _InProcessTransport.address

    async def model(self) -> ModelInfo:
        """Return the model, without waiting."""
        return self._info

    @asynccontextmanager
    async def connect(self, info: ModelInfo) -> AsyncIterator[_InProcessTransport]:
        """Connect a drafter; it is removed when the block ends."""
        transport = _InProcessTransport(self._engine, info)
        try:
            yield transport
        finally:
            transport.close()


@dataclass(frozen=True, slots=True)
class InProcessDrafter:
    """A drafter that runs in this process, on the verifier's event loop and on its own threads.

    `name` is its id. `run` drafts for this verifier until it is cancelled. If `run` ends earlier,
    the verifier continues without the drafter. `meet` is called on the engine's thread with the
    loaded target, before CUDA graphs are captured, and returns the hidden states that the drafter
    reads. `meet` may run forwards. With vLLM, `meet` is called with None instead, before vLLM loads
    the target.
    """

    name: str
    run: Callable[[InProcessVerifier], Coroutine[Any, Any, None]]
    meet: Callable[[ModelRunner | None], Sequence[int]]


class _InProcessTransport:
    """Connects to the engine in this process, as an `outrider.drafter.transport.Transport`."""

    address = "its own process"

    def __init__(self, engine: EngineThread[DraftingEngine], info: ModelInfo) -> None:
        self._engine = engine
        self._info = info
        self._unread = UnreadSteps()
        self._joined: list[Drafter] = []

    async def introduce(self, hello: Hello) -> Welcome:
        """Join the exchange. The drafter is trusted as much as the verifier itself."""
        info = self._info

        def join() -> Drafter:
            drafter = self._engine.engine.drafting.join(hello, self._unread.put, is_local=True)
            self._joined.append(drafter)
            return drafter

        try:
            check_tokenizer(hello, info.tokenizer_fingerprint)
            drafter = await self._engine.call(join)
        except OutriderError as refusal:
            raise StreamEnded(refusal) from refusal
        return Welcome(
            info.model_id,
            info.vocab_size,
            info.context_length,
            drafter.feature_width,
            drafter.projects_features,
        )

    async def read(self) -> StepBatch | None:
        """Wait for the next step; return None after the goodbye."""
        try:
            return await self._unread.get()
        except OutriderError as reason:
            raise StreamEnded(reason) from reason

    async def write(self, batch: DraftBatch) -> None:
        """Pass drafts to the engine, which takes them between two steps."""
        engine = self._engine
        take = engine.engine.drafting.on_drafts
        arrived_at = engine.engine.clock()
        for drafter in self._joined:
            engine.post(partial(take, drafter, batch, 0, arrived_at))

    async def say_goodbye(self) -> None:
        """Ask for no more sequences, and let `read` end."""
        for drafter in self._joined:
            self._engine.post(partial(self._engine.engine.drafting.drain, drafter, 0))
        self._unread.end()

    def close(self) -> None:
        """Leave the exchange, even if the call of `introduce` was cancelled."""

        def leave() -> None:
            for drafter in self._joined:
                self._engine.engine.drafting.leave(drafter)

        self._engine.post(leave)
