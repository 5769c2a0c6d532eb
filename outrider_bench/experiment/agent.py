"""`outrider agent`: starts and stops Outrider's processes for an experiment on another machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from outrider.errors import OutriderError
from outrider.internal.v1 import agent_pb2_grpc
from outrider.process import rpc
from outrider.process.config import Settings, command
from outrider.process.tls import TlsSettings
from outrider.process.usage import invoke, refuse
from outrider_bench.experiment.agent_service import SERVICE, AgentServicer
from outrider_bench.experiment.machine import commit, this_machine
from outrider_bench.experiment.tls import require_tls, split_address

_PROGRAM = "outrider agent"
_ROOT = Path(__file__).parents[2]
_MAX_REQUEST_BYTES = 2 * 1024 * 1024


class AgentSettings(TlsSettings, Settings):
    """Start and stop Outrider's processes here for an experiment elsewhere, until Ctrl-C.

    An address beyond loopback needs mutual TLS, since clients start processes; a client's
    certificate must have the role operator.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_AGENT_")

    listen: str = Field("127.0.0.1:7070")
    """host:port to serve on; port 0 takes any."""

    @model_validator(mode="after")
    def _is_protected(self) -> Self:
        try:
            require_tls("listen", self.listen, self.tls)
        except OutriderError as error:
            raise ValueError(error.message) from error
        return self


def main(arguments: list[str]) -> int:
    """The exit status."""
    status: int = invoke(command(AgentSettings, _PROGRAM, _run), _PROGRAM, arguments)
    return status


def _run(settings: AgentSettings) -> int:
    # Models are named by their paths in the checkout.
    os.chdir(_ROOT)
    try:
        asyncio.run(serve(settings))
    except OutriderError as error:
        refuse(_PROGRAM, error.message)
    return 0


async def serve(settings: AgentSettings) -> None:
    """Serve until SIGTERM or SIGINT, then end the processes.

    Raises OutriderError when the address cannot be bound.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    code = commit(_ROOT)
    servicer = AgentServicer(json.dumps(asdict(this_machine())), code)
    server = rpc.Server(SERVICE, max_request_bytes=_MAX_REQUEST_BYTES)
    agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server.grpc)
    try:
        tls = settings.tls
        [port] = await server.start(settings.listen, tls=tls)
        await server.set_serving(True)
        host, _ = split_address("listen", settings.listen)
        protection = "mutual TLS" if tls is not None else "no TLS"
        place = f"{host}:{port} with {protection}"
        print(f"agent listens on {place} and runs commit {code}", flush=True)
        await stopped.wait()
    finally:
        await server.stop(0.0)
        await servicer.close()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
