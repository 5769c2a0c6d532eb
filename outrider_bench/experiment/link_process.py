"""Runs a link in its own process, so that no other work delays it.

The control port takes JSON objects that change the link, one per line. The process answers each
object with the link's traffic.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from outrider_bench.experiment.links import Direction, ShapedLink, exact_loop
from outrider_bench.experiment.records import LinkTraffic
from outrider_bench.experiment.spec import Link

_ANSWER_S = 10.0
_KEYS = {"shape", "outage_s", "direction", "vanish", "reset"}


class LinkControl:
    """Talks to a link's process.

    Its methods raise ConnectionError if the process is not there, TimeoutError if it does not
    answer within 10 s, and ValueError if it refuses the message.
    """

    def __init__(self, host: str, port: int) -> None:
        self.address = (host, port)

    async def shape(self, link: Link) -> None:
        """Change the shape of the link for bytes that come from now on."""
        await self._ask({"shape": link.model_dump()})

    async def outage(self, seconds: float, direction: Direction = "both") -> None:
        """Hold back a direction's bytes, and all new connections, for some seconds."""
        await self._ask({"outage_s": seconds, "direction": direction})

    async def vanish(self) -> None:
        """Lose all further bytes of the present connections, and leave them open."""
        await self._ask({"vanish": True})

    async def reset(self) -> None:
        """Cut all connections."""
        await self._ask({"reset": True})

    async def traffic(self) -> LinkTraffic:
        """Return the bytes and connections since the link's start."""
        return LinkTraffic(**(await self._ask({}))["traffic"])

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(*self.address)
            try:
                writer.write(json.dumps(message).encode() + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
                await writer.wait_closed()
        if not line:
            raise ConnectionError(f"the link at {self.address[0]}:{self.address[1]} hung up")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


def control_of(link: ShapedLink) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
    """Return the handler of connections to the control port."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(json.dumps(_answer(link, line)).encode() + b"\n")
        writer.close()

    return connected


def _answer(link: ShapedLink, line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
        if unknown := set(message) - _KEYS:
            known = ", ".join(sorted(_KEYS))
            raise ValueError(f"{', '.join(sorted(unknown))}: must be one of {known}")
        if "shape" in message:
            link.change(Link.model_validate(message["shape"]))
        if "outage_s" in message:
            link.outage(float(message["outage_s"]), message.get("direction", "both"))
        if message.get("vanish"):
            link.vanish()
        if message.get("reset"):
            link.reset()
    except (ValueError, TypeError, ValidationError) as error:
        return {"error": str(error)}
    return {"traffic": asdict(link.traffic)}


def address_of(text: str) -> tuple[str, int]:
    """Split host:port; raise ValueError for other text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(f"must be host:port, not {text!r}")
    return host, int(port)


async def serve(
    control: tuple[str, int], forwards: list[tuple[tuple[str, int], tuple[str, int]]]
) -> None:
    """Forward connections from each first address to the second of its pair, until SIGTERM."""
    link = ShapedLink(Link.model_validate({}))
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with AsyncExitStack() as stack:
        for listen, target in forwards:
            await stack.enter_async_context(link.forward(listen, target))
        server = await asyncio.start_server(control_of(link), *control)
        await stopped.wait()
        server.close()


def main() -> None:
    """Run the link that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--control", type=address_of, required=True, help="host:port of the control port")
    forward_help = "host:port=host:port; may be repeated"
    add("--forward", action="append", required=True, metavar="LISTEN=TARGET", help=forward_help)
    given = parser.parse_args()
    pairs = [text.partition("=") for text in given.forward]
    forwards = [(address_of(listen), address_of(target)) for listen, _, target in pairs]
    with asyncio.Runner(loop_factory=exact_loop) as runner:
        runner.run(serve(given.control, forwards))


if __name__ == "__main__":
    main()
