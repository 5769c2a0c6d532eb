"""An engine with a table model, served on a port of loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from outrider.internal.v1 import token_streams_pb2_grpc
from outrider.process.network import rpc
from outrider.process.security.tls import Tls
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.v1 import verifier_pb2_grpc
from tests.verifier.fake_model import VOCAB, exposition, make_engine
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.engine.loop import Engine
from verifier_svc.streams.servicer import VerifierServicer


class Verifier:
    """The engine, its thread and its address."""

    def __init__(self, engine: Engine, thread: EngineThread[Engine], port: int) -> None:
        self.engine = engine
        self.thread = thread
        self.port = port
        self.address = f"127.0.0.1:{port}"

    async def exposition(self) -> str:
        """Return all metrics so far in Prometheus' text format."""
        await self.thread.call(self.engine._metrics.flush)
        return exposition(self.engine)


@asynccontextmanager
async def verifier(
    tls: Tls | None = None, context_length: int = 64, **options: Any
) -> AsyncIterator[Verifier]:
    """Serve an engine that `make_engine` makes with these options."""
    thread = EngineThread(lambda deliver: make_engine(deliver=deliver, **options)[0])
    engine = await thread.built
    servicer = VerifierServicer("fake")
    servicer.serve(thread, ModelInfo("fake", Stage.READY, "serving", "f", VOCAB, context_length))
    server = rpc.Server("outrider.v1.VerifierService")
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server.grpc)
    token_streams_pb2_grpc.add_TokenStreamServiceServicer_to_server(servicer, server.grpc)
    [port] = await server.start("127.0.0.1:0", tls=tls)
    try:
        yield Verifier(engine, thread, port)
    finally:
        await server.stop(0)
        await thread.stop()
