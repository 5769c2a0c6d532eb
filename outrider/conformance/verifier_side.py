"""Checks a verifier: plays a client and a drafter against any VerifierService."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from outrider.conformance.progress import tracked
from outrider.conformance.scripted_verifier import Broken
from outrider.errors import OutriderError, Reason
from outrider.process import rpc, rpc_errors
from outrider.process.certs import Authority
from outrider.process.roles import Role
from outrider.process.tls import Tls
from outrider.v1 import common_pb2, drafts_pb2, verifier_pb2, verifier_pb2_grpc

_PROMPT = list(range(5, 25))
_TOKENS = 24
_WAIT_S = 20.0
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # grpc-stubs lack it
Request = verifier_pb2.GenerateTokensRequest
Step = verifier_pb2.StreamDraftsResponse

RULES = {
    "model": "GetModel says READY, the vocabulary size and the context length.",
    "tokens": "GenerateTokens streams max_tokens ids, and finish_reason and stats at the end.",
    "seeds": "Two requests with the same 64-bit seed get the same tokens.",
    "limits": "A value out of range is INVALID_ARGUMENT, with reason and field.",
    "cancel": "A cancelled call does not affect later calls.",
    "hello": "A different tokenizer and a taken id are refused, each with its reason.",
    "opened": "Opened hands a sequence to the drafter, with every committed token.",
    "verdicts": "Verdicts have the tokens that the client receives, in order and without a gap.",
    "accepts": "Guesses that match the target's tokens are accepted.",
    "lossless": "Right, wrong, late and repeated guesses do not change the text.",
    "unknown": "The verifier ignores a message of an unknown kind.",
    "violations": "An invalid message ends the stream with PROTOCOL_VIOLATION.",
    "leaving": "After Draining and half-closing the stream ends with OK.",
}


class Drafter:
    """A scripted drafter on one stream."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.texts: dict[int, list[int]] = {}
        self.accepted = 0

    async def send(self, **message: Any) -> None:
        """Send a message with these fields.

        No effect if the stream has ended; `receive` raises its status.
        """
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.call.write(verifier_pb2.StreamDraftsRequest(**message))

    async def receive(self) -> Step:
        """The next message, or EOF; raises TimeoutError after 20 s."""
        async with asyncio.timeout(_WAIT_S):
            response: Step = await self.call.read()
        return response

    async def follow(self, guess: Callable[[list[int]], list[int]], repeats: int = 1) -> None:
        """Answer each message until the first sequence is closed; send proposals `repeats` times.

        `guess` maps a committed text to guesses.
        """
        while True:
            response = await self.receive()
            if response == _END:
                raise Broken("opened", "the stream ended")
            step = response.step
            for opened in step.opened:
                self.texts[opened.sequence_id] = list(opened.token_ids)
            for verdict in step.verdicts:
                self._commit(verdict)
            asked = [opened.sequence_id for opened in step.opened]
            for sequence_id in [*asked, *(verdict.sequence_id for verdict in step.verdicts)]:
                await self._answer(sequence_id, guess, repeats)
            if step.closed:
                return

    def _commit(self, verdict: drafts_pb2.Verdict) -> None:
        text = self.texts[verdict.sequence_id]
        fresh = verdict.committed_length - len(text)
        if not 0 <= fresh <= len(verdict.new_token_ids):
            raise Broken("verdicts", f"from length {len(text)} to {verdict.committed_length}")
        text += list(verdict.new_token_ids)[len(verdict.new_token_ids) - fresh :]
        self.accepted += verdict.accepted_count

    async def _answer(
        self, sequence_id: int, guess: Callable[[list[int]], list[int]], repeats: int
    ) -> None:
        text = self.texts[sequence_id]
        place: dict[str, Any] = {"sequence_id": sequence_id, "base_length": len(text)}
        found = guess(text)
        if not found:
            await self.send(drafts=drafts_pb2.DraftBatch(skips=[drafts_pb2.Skip(**place)]))
            return
        proposal = drafts_pb2.Proposal(**place, token_ids=found)
        for _ in range(repeats):
            await self.send(drafts=drafts_pb2.DraftBatch(proposals=[proposal]))


class VerifierCheck:
    """The check of one verifier.

    `certs` is a folder with the authority of a verifier that has TLS. Each drafter of the check has
    a certificate of its own, since a quarantine is for all drafters of a certificate.
    """

    def __init__(self, address: str, certs: Path | None = None) -> None:
        self.results: dict[str, str | None] = {}
        """By tested rule, the reason why it failed, or None."""
        self._address = address
        self._certs = certs
        self._stub: Any = None
        self._model = verifier_pb2.GetModelResponse()
        self._plain: list[int] = []

    async def run(self) -> None:
        """Play all parts; stops early if the verifier generates no tokens."""
        # Each part, keyed by the rule that counts as broken when its call fails.
        parts = {
            "tokens": self._client,
            "hello": self._hello,
            "opened": self._drafts,
            "violations": self._violations,
            "leaving": self._leaving,
        }
        async with self._dial(Role.OPERATOR, "conformance-client") as channel:
            self._stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            for rule, part in tracked([*parts.items()], "rules"):
                try:
                    await part()
                except Broken as broken:
                    self.results[broken.rule] = broken.reason
                except grpc.aio.AioRpcError as failure:
                    self.results[rule] = f"{failure.code().name}: {failure.details()}"
                except TimeoutError:
                    self.results[rule] = f"nothing came for {_WAIT_S:.0f} s"
                if not self._plain:
                    # Without tokens there is nothing to draft for.
                    return

    @asynccontextmanager
    async def _dial(self, role: Role, name: str) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to the verifier, with a new certificate if it has TLS."""
        tls = None
        with tempfile.TemporaryDirectory(prefix="outrider-conformance-") as directory:
            if self._certs is not None:
                folder = Path(directory)
                authority = Authority.load(self._certs)
                authority.write_issued(folder, role.value, name, [], timedelta(hours=1))
                tls = Tls(folder / f"{name}.pem", folder / f"{name}.key", self._certs / "ca.pem")
            async with rpc.dial(self._address, tls) as channel:
                yield channel

    def _hold(self, rule: str, fact: bool, reason: str) -> None:
        if not fact:
            raise Broken(rule, reason)
        self.results.setdefault(rule, None)

    async def _tokens(self, **fields: Any) -> list[Any]:
        sampling = fields.pop("sampling", common_pb2.SamplingParams(temperature=0))
        given: dict[str, Any] = {"prompt_token_ids": _PROMPT, "max_tokens": _TOKENS, **fields}
        request = Request(**given, ignore_eos=True, sampling=sampling)
        return [part async for part in self._stub.GenerateTokens(request, timeout=_WAIT_S)]

    async def _error(self, call: Awaitable[Any]) -> OutriderError:
        try:
            await call
        except grpc.aio.AioRpcError as failure:
            return rpc_errors.error_of(failure)
        return OutriderError(Reason.INTERNAL, "no error")

    async def _client(self) -> None:
        self._model = await self._stub.GetModel(verifier_pb2.GetModelRequest(), timeout=_WAIT_S)
        model = self._model
        ready = model.stage == verifier_pb2.MODEL_STAGE_READY and model.vocab_size > 0
        self._hold("model", ready and model.context_length > 0, f"it says {model}")
        parts = await self._tokens(speculation=common_pb2.SpeculationOptions(enabled=False))
        self._plain = ids(parts)
        whole = len(self._plain) == _TOKENS and parts[-1].finish_reason != 0
        self._hold("tokens", whole and parts[-1].HasField("stats"), f"{len(self._plain)} ids")
        seeded = common_pb2.SamplingParams(temperature=1, seed=2**64 - 1)
        drawn = [ids(await self._tokens(sampling=seeded)) for _ in range(2)]
        self._hold("seeds", drawn[0] == drawn[1], "two texts of one seed differ")
        hot = common_pb2.SamplingParams(temperature=9)
        error = await self._error(self._tokens(sampling=hot))
        right = (error.reason, error.field) == (Reason.INVALID_VALUE, "sampling.temperature")
        self._hold("limits", right, f"temperature 9 gave {error.reason.name}: {error}")
        call = self._stub.GenerateTokens(Request(prompt_token_ids=_PROMPT, max_tokens=500))
        await call.read()
        call.cancel()
        same = ids(await self._tokens()) == self._plain
        self._hold("cancel", same, "the call after it has another text")

    @asynccontextmanager
    async def _drafter(self, name: str, **hello: Any) -> AsyncIterator[Drafter]:
        fields: dict[str, Any] = {
            "drafter_id": name,
            "family": name,
            "tokenizer_fingerprint": self._model.tokenizer_fingerprint,
            "max_draft_tokens": 8,
        } | hello
        async with self._dial(Role.DRAFTER, name) as channel:
            stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
            call = stub.StreamDrafts()
            drafter = Drafter(call)
            await drafter.send(hello=drafts_pb2.Hello(**fields))
            try:
                yield drafter
            finally:
                call.cancel()

    async def _hello(self) -> None:
        async with self._drafter("conformance-stranger", tokenizer_fingerprint="f00d") as drafter:
            _, error = await ending(drafter)
        name = error.reason.name
        self._hold("hello", error.reason is Reason.TOKENIZER_MISMATCH, f"mismatch: {name}")
        async with self._drafter("conformance-twin") as first:
            await first.receive()
            async with self._drafter("conformance-twin") as second:
                _, error = await ending(second)
        name = error.reason.name
        self._hold("hello", error.reason is Reason.DRAFTER_ID_TAKEN, f"taken id: {name}")

    async def _drafts(self) -> None:
        whole = [*_PROMPT, *self._plain]

        def right(text: list[int]) -> list[int]:
            return whole[len(text) : len(text) + 4]

        def wrong(text: list[int]) -> list[int]:
            return [(token + 1) % self._model.vocab_size for token in right(text)]

        name = "conformance-drafter"
        async with self._drafter(name) as drafter:
            await drafter.receive()
            await drafter.send()  # a message without a kind
            for guess, repeats in ((right, 1), (wrong, 1), (right, 3)):
                asked = common_pb2.SpeculationOptions(drafter_id=name)
                text = asyncio.create_task(self._tokens(speculation=asked))
                await drafter.follow(guess, repeats)
                self._hold("unknown", True, "")
                self._hold("opened", True, "")
                same = ids(await text) == self._plain
                self._hold("lossless", same, f"{guess.__name__} guesses change the text")
                text_here = next(iter(drafter.texts.values()))
                same = text_here == whole[: len(text_here)]
                self._hold("verdicts", same, "the verdicts' tokens differ from the client's")
                drafter.texts.clear()
            self._hold("accepts", drafter.accepted > 0, "no guess was accepted")

    async def _violations(self) -> None:
        wrongs: dict[str, dict[str, Any]] = {
            "an unknown sequence": {"sequence_id": 2**52, "base_length": 1, "token_ids": [1]},
            "a proposal without tokens": {"sequence_id": 2**52, "base_length": 1},
            "an id out of range": {"base_length": 1, "token_ids": [self._model.vocab_size]},
            "a confidence of 2": {"base_length": 1, "token_ids": [1], "confidences": [2.0]},
        }
        for number, (fault, fields) in enumerate(wrongs.items()):
            async with self._drafter(f"conformance-liar-{number}") as drafter:
                await drafter.receive()
                proposal = drafts_pb2.Proposal(**fields)
                await drafter.send(drafts=drafts_pb2.DraftBatch(proposals=[proposal]))
                _, error = await ending(drafter)
            right = error.reason is Reason.PROTOCOL_VIOLATION and error.field is not None
            self._hold("violations", right, f"{fault} gave {error.reason.name}")

    async def _leaving(self) -> None:
        async with self._drafter("conformance-leaver") as drafter:
            await drafter.receive()
            await drafter.send(draining=drafts_pb2.Draining(reason="the check is over"))
            await drafter.call.done_writing()
            code, _ = await ending(drafter)
        self._hold("leaving", code is grpc.StatusCode.OK, f"it ends with {code.name}")


async def ending(drafter: Drafter) -> tuple[grpc.StatusCode, OutriderError]:
    """Read to the end of the stream; returns its status and error."""
    with suppress(grpc.aio.AioRpcError):
        while await drafter.receive() != _END:
            pass
    call = drafter.call
    code, details = await call.code(), await call.details()
    initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
    return code, rpc_errors.error_of(grpc.aio.AioRpcError(code, initial, trailing, details, None))


def ids(parts: list[Any]) -> list[int]:
    """The token ids of all parts of an answer."""
    return [token for part in parts for token in part.token_ids]


def check_verifier(address: str, certs: Path | None = None) -> int:
    """Check the verifier at host:port, print the results, and return the exit status.

    `certs` is a folder that `outrider certs` made, if the verifier has TLS. Raises
    OutriderError(INVALID_VALUE) if it holds no authority.
    """
    check = VerifierCheck(address, certs)
    asyncio.run(check.run())
    table = Table("rule", "", "statement; reason of the failure")
    for rule, says in RULES.items():
        wrong = check.results.get(rule, "not reached, since an earlier rule failed")
        if wrong is None:
            table.add_row(rule, "[green]pass[/]", says)
        else:
            table.add_row(rule, "[bold red]FAIL[/]", f"{says}\n[red]{wrong}[/]")
    Console().print(table)
    return int(any(check.results.get(rule, "") is not None for rule in RULES))
