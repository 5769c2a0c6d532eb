"""A site's authority and certificates, and a verifier with TLS on a free port."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

from fake_model import VOCAB, make_engine

from outrider.internal.v1.token_streams_pb2_grpc import add_TokenStreamServiceServicer_to_server
from outrider.process import rpc
from outrider.process.certs import Authority
from outrider.process.tls import Tls
from outrider.protocol.model_info import ModelInfo, Stage
from outrider.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.engine.loop import Engine
from verifier_svc.streams.servicer import VerifierServicer

FINGERPRINT = "f"


class Site:
    """An authority in a folder, and certificates that it or another one signed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authority = Authority.new()
        self._authority.write(folder)
        self._other = Authority.new()

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, kind: str, name: str = "", *, hours: float = 1.0, foreign: bool = False) -> Tls:
        """Write a certificate, in place of an earlier one of the same name."""
        name = name or kind
        authority = self._other if foreign else self._authority
        authority.write_issued(self.folder, kind, name, [], timedelta(hours=hours))
        return Tls(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.ca)

    def context(self, tls: Tls | None) -> ssl.SSLContext:
        """TLS of a client that trusts the authority and shows a certificate, or none."""
        return trusting(self.ca, tls)

    async def serial(self, port: int, tls: Tls) -> str:
        """The serial number of the certificate that a server on 127.0.0.1 shows now."""
        context = self.context(tls)
        context.set_alpn_protocols(["h2", "http/1.1"])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        serial: str = writer.get_extra_info("peercert")["serialNumber"]
        writer.transport.abort()
        return serial


def trusting(ca: Path, tls: Tls | None) -> ssl.SSLContext:
    """TLS of a client that trusts an authority and shows a certificate, or none."""
    context = ssl.create_default_context(cafile=str(ca))
    if tls is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


@asynccontextmanager
async def verifier(tls: Tls | None) -> AsyncIterator[tuple[str, Engine]]:
    """A verifier's address and its engine, which has a table for a model."""
    thread = EngineThread(lambda deliver: make_engine(deliver=deliver)[0])
    engine = await thread.built
    servicer = VerifierServicer("fake")
    servicer.serve(thread, ModelInfo("fake", Stage.READY, "serving", FINGERPRINT, VOCAB, 64))
    server = rpc.Server("outrider.v1.VerifierService")
    add_VerifierServiceServicer_to_server(servicer, server.grpc)
    add_TokenStreamServiceServicer_to_server(servicer, server.grpc)
    [port] = await server.start("127.0.0.1:0", tls=tls)
    try:
        yield f"127.0.0.1:{port}", engine
    finally:
        await server.stop(0)
        await thread.stop()
