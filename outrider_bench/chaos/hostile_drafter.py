"""A drafter that misbehaves in one way, which the protocol may allow.

Usage: hostile_drafter WAY ADDRESS... [--tls-cert FILE --tls-key FILE --tls-ca FILE]
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import click
import grpc

from outrider.process.network import rpc
from outrider.process.security.tls import Tls
from outrider.v1 import drafts_pb2, verifier_pb2, verifier_pb2_grpc

_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # grpc-stubs lack it
_AGAIN_S = 0.2
_METHOD = "/outrider.v1.VerifierService/StreamDrafts"
_VOCABULARY = 4096
"""The number of token ids of the bundled target."""

Call = Any
Spoil = Callable[[drafts_pb2.Proposal], None]


async def _places(call: Call) -> AsyncIterator[tuple[int, int, int]]:
    """Yield the place of each opened sequence and of each verdict.

    A place is the sequence's id, its committed length, and the number of wanted draft tokens.
    """
    while (response := await call.read()) != _END:
        for opened in response.step.opened:
            yield opened.sequence_id, len(opened.token_ids), opened.draft_tokens
        for verdict in response.step.verdicts:
            yield verdict.sequence_id, verdict.committed_length, verdict.draft_tokens


def _guess(sequence_id: int, base: int, count: int) -> drafts_pb2.Proposal:
    ids = random.choices(range(_VOCABULARY), k=max(count, 1))
    return drafts_pb2.Proposal(sequence_id=sequence_id, base_length=base, token_ids=ids)


async def _say(call: Call, proposals: Iterable[drafts_pb2.Proposal]) -> None:
    batch = drafts_pb2.DraftBatch(proposals=proposals)
    await call.write(verifier_pb2.StreamDraftsRequest(drafts=batch))


def _answers(spoil: Spoil, times: int = 1) -> Callable[[Call], Awaitable[None]]:
    """Return an attack that sends a proposal `times` times for each opened sequence and verdict.

    `spoil` changes the proposal.
    """

    async def attack(call: Call) -> None:
        async for place in _places(call):
            proposal = _guess(*place)
            spoil(proposal)
            for _ in range(times):
                await _say(call, [proposal])

    return attack


def _nothing(proposal: drafts_pb2.Proposal) -> None:
    """Leave the proposal unchanged: its random guesses are wrong, but allowed."""


def _ids_out_of_range(proposal: drafts_pb2.Proposal) -> None:
    proposal.token_ids[0] = 2**32 - 1


def _certain(proposal: drafts_pb2.Proposal) -> None:
    """Claim that each token was drawn with probability 1."""
    for token in proposal.token_ids:
        proposal.distributions.add(token_ids=[token], probabilities=[1.0])


async def _hang(call: Call) -> None:
    async for _ in _places(call):
        pass


async def _never_read(call: Call) -> None:
    await asyncio.Event().wait()


async def _flood(call: Call) -> None:
    """Propose about every millisecond for every sequence ever opened; another task reads."""
    known: dict[int, int] = {}

    async def follow() -> None:
        async for sequence_id, base, _ in _places(call):
            known[sequence_id] = base

    following = asyncio.create_task(follow())
    try:
        while not call.done():
            await _say(call, [_guess(sequence, base, 16) for sequence, base in known.items()])
            await asyncio.sleep(0.001)
    finally:
        following.cancel()


async def _come_and_go(call: Call) -> None:
    """Leave right after the Welcome."""
    await call.read()


_WAYS: dict[str, Callable[[Call], Awaitable[None]]] = {
    "lies": _answers(_nothing),
    "repeats itself": _answers(_nothing, times=20),
    "ids out of range": _answers(_ids_out_of_range),
    "false distributions": _answers(_certain),
    "hangs": _hang,
    "never reads": _never_read,
    "floods": _flood,
    "comes and goes": _come_and_go,
}
_GARBAGE = "garbage"


async def _stream(way: str, channel: grpc.aio.Channel) -> None:
    """Serve one draft stream, from Hello to its end."""
    stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
    info = await stub.GetModel(verifier_pb2.GetModelRequest(), timeout=5)
    hello = drafts_pb2.Hello(
        drafter_id=f"hostile/{os.getpid()}",
        family="hostile",
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        max_draft_tokens=16,
        distributions=[drafts_pb2.DRAFT_DISTRIBUTION_SPARSE],
    )
    first = verifier_pb2.StreamDraftsRequest(hello=hello)
    if way == _GARBAGE:
        # Without serializers, the call takes bytes.
        raw: Call = cast(Any, channel).stream_stream(_METHOD)()
        await raw.write(first.SerializeToString())
        await raw.read()
        await raw.write(random.randbytes(200))
        await raw.read()
        return
    call = stub.StreamDrafts()
    try:
        await call.write(first)
        await _WAYS[way](call)
    finally:
        call.cancel()


async def _attack(way: str, address: str, tls: Tls | None) -> None:
    """Join again and again, since the verifier ends bad streams and may be down."""
    async with rpc.dial(address, tls) as channel:
        while True:
            # grpc.aio raises InvalidStateError for a write to a stream that has just ended.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await _stream(way, channel)
            await asyncio.sleep(_AGAIN_S)


async def _main(way: str, addresses: list[str], tls: Tls | None) -> None:
    await asyncio.gather(*(_attack(way, address, tls) for address in addresses))


@click.command()
@click.argument("way", type=click.Choice([*_WAYS, _GARBAGE]))
@click.argument("addresses", nargs=-1, required=True)
@click.option("--tls-cert", type=click.Path(path_type=Path))
@click.option("--tls-key", type=click.Path(path_type=Path))
@click.option("--tls-ca", type=click.Path(path_type=Path))
def main(
    way: str,
    addresses: tuple[str, ...],
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
) -> None:
    """Attack the verifiers at ADDRESSES until the process is ended."""
    asyncio.run(_main(way, list(addresses), Tls.of(tls_cert, tls_key, tls_ca)))


if __name__ == "__main__":
    main()
