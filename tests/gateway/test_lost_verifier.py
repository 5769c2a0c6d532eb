"""A verifier that vanishes or sends impossible values affects no other verifier's requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from chaos_proxy import ChaosProxy, chaos_proxy
from gateway_rig import TARGET, Rig, echo, until
from scripted_verifier import Script, ScriptedVerifier, last, plain, ready, serve_verifier

from gateway.config import GatewaySettings
from gateway.metrics import Metrics
from gateway.server import Gateway, running
from gateway.text.prompts import Prompts
from gateway.upstream import replica, routing
from outrider.errors import Reason
from outrider.process import rpc
from outrider.protocol.messages import (
    FinishReason,
    SpeculationStats,
    TokenChunk,
    TokenLogprob,
    TokenSource,
)
from outrider.protocol.model_info import DrafterInfo, Placement, Stage
from outrider.protocol.wire import model as wire_model
from outrider.protocol.wire import requests as wire_requests
from outrider.v1 import common_pb2, verifier_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")

GET_MODEL = "/outrider.v1.VerifierService/GetModel"


class LyingVerifier(ScriptedVerifier):
    """Answers GetModel with the bytes of `says`, if there are any, and else by its script."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.says: bytes | None = None
        self.asked = 0


class _GenericOnly:
    """Adds the methods of a server by name only, so that handlers added earlier come first."""

    def __init__(self, server: rpc.Server) -> None:
        self.add_generic_rpc_handlers = server.grpc.add_generic_rpc_handlers

    def add_registered_method_handlers(self, *_: Any) -> None:
        """Ignore these methods. A server would find them before those by name."""


class _Raw(grpc.GenericRpcHandler):
    """GetModel without protobuf's own serialisation."""

    def __init__(self, verifier: LyingVerifier) -> None:
        self._verifier = verifier

    def service(self, call: Any) -> Any:
        if call.method != GET_MODEL:
            return None
        return grpc.unary_unary_rpc_method_handler(self._answer, request_deserializer=bytes)

    async def _answer(self, request: bytes, context: Any) -> bytes:
        self._verifier.asked += 1
        if self._verifier.says is not None:
            return self._verifier.says
        if self._verifier.script.unreachable:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return wire_model.model_to_proto(self._verifier.script.info).SerializeToString()


class Pair:
    """A gateway with two verifiers. The first is behind a proxy, and its GetModel can be faked."""

    def __init__(self, prompts: Prompts) -> None:
        self.first = Script(ready(prompts.fingerprint), echo)
        self.second = Script(ready(prompts.fingerprint), echo)
        self.liar = LyingVerifier(self.first)
        self.proxy: ChaosProxy
        self.gateway: Gateway
        self.http: httpx.AsyncClient

    async def ask(self, **body: Any) -> httpx.Response:
        return await self.http.post(
            "/v1/completions", json={"prompt": "if x", "temperature": 0} | body
        )

    @property
    def first_has_begun(self) -> bool:
        """Whether the gateway has a chunk of each sequence that runs at the first verifier."""
        call = self.gateway.router.replicas[0].tokens._call
        return call is not None and not call._waiting

    @property
    def problems(self) -> list[Reason | None]:
        return [
            replica.problem.reason if replica.problem else None
            for replica in self.gateway.router.replicas
        ]


@pytest_asyncio.fixture(loop_scope="session")
async def pair(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(routing, "_POLL_READY_S", 0.05)
    monkeypatch.setattr(replica, "_POLL_TIMEOUT_S", 0.5)
    made = Pair(prompts)
    async with contextlib.AsyncExitStack() as stack:
        servers = [rpc.Server() for _ in range(2)]
        servers[0].grpc.add_generic_rpc_handlers((_Raw(made.liar),))
        for server, verifier in zip(
            servers, (made.liar, ScriptedVerifier(made.second)), strict=True
        ):
            # It has only the methods of a server that `serve_verifier` calls.
            serve_verifier(verifier, _GenericOnly(server))  # type: ignore[arg-type]
            await server.start("127.0.0.1:0")
            stack.push_async_callback(server.stop, 0)
        made.proxy = await stack.enter_async_context(chaos_proxy(servers[0].ports[0]))
        addresses = [f"127.0.0.1:{made.proxy.port}", f"127.0.0.1:{servers[1].ports[0]}"]
        settings = GatewaySettings(
            verifier=addresses,
            tokenizer=TARGET,
            http_port=0,
            grpc_listen="127.0.0.1:0",
            drain_seconds=0,
        )
        made.gateway = await stack.enter_async_context(running(settings, Metrics()))
        made.http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=made.gateway.http_url, timeout=30)
        )
        await until(lambda: made.problems == [None, None])
        yield made


@pytest.mark.parametrize("stream", [False, True])
async def test_waiting_sequences_leave_a_verifier_when_its_poll_fails(
    pair: Pair, stream: bool
) -> None:
    """The connection stays open, as when a machine dies, so the call does not end by itself."""
    pair.first.answer = lambda _: [60.0]
    asked = asyncio.create_task(pair.ask(stream=stream))
    await until(lambda: pair.first.running == 1)
    pair.proxy.swallow()
    response = await asked
    assert (response.status_code, "if x" in response.text) == (200, True)
    assert len(pair.second.requests) == 1


async def test_a_sequence_with_a_chunk_leaves_a_verifier_that_is_silent_for_long(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its event loop hangs: gRPC answers pings without it, so the call does not end."""
    monkeypatch.setattr(routing, "_SILENT_S", 0.5)
    pair.first.answer = lambda request: [plain(request.prompt[:1]), 60.0]
    asked = asyncio.create_task(pair.ask(stream=True))
    await until(lambda: pair.first.running == 1)
    await until(lambda: pair.first_has_begun)
    pair.first.unreachable = True
    assert "[DONE]" in (await asked).text
    [continued] = pair.second.requests
    assert len(continued.committed) == 1


async def test_a_sequence_with_a_chunk_stays_when_the_poll_fails(pair: Pair) -> None:
    pair.first.answer = lambda request: [
        plain(request.prompt[:1]),
        1.0,
        plain(request.prompt[1:]),
        last([3], FinishReason.STOP),
    ]
    asked = asyncio.create_task(pair.ask(stream=True))
    await until(
        lambda: len(pair.gateway.router.replicas[0].sequences) == 1 and pair.first.running == 1
    )
    await until(lambda: pair.first_has_begun)
    pair.first.unreachable = True
    await until(lambda: pair.problems[0] is Reason.VERIFIER_UNAVAILABLE)
    assert "[DONE]" in (await asked).text
    assert pair.second.requests == []


async def test_without_another_verifier_waiting_sequences_stay(pair: Pair) -> None:
    """No other verifier would serve them, and this one may only be slow."""
    pair.second.info = replace(pair.second.info, stage=Stage.DRAINING)
    await until(lambda: pair.problems[1] is Reason.DRAINING)
    pair.first.answer = lambda request: [1.0, *echo(request)]
    asked = asyncio.create_task(pair.ask())
    await until(lambda: pair.first.running == 1)
    pair.first.unreachable = True
    await until(lambda: pair.problems[0] is Reason.VERIFIER_UNAVAILABLE)
    assert (await asked).status_code == 200


async def test_a_half_open_connection_is_replaced_as_soon_as_a_poll_fails(pair: Pair) -> None:
    pair.second.unreachable = True
    await until(lambda: pair.problems[1] is Reason.VERIFIER_UNAVAILABLE)
    channel = pair.gateway.router.replicas[0]._channel
    pair.proxy.swallow()
    # gRPC itself would close the connection after 12 s.
    await until(lambda: pair.gateway.router.replicas[0]._channel is not channel)
    await until(lambda: pair.problems[0] is None)
    assert (await pair.ask()).status_code == 200


def _unknown_stage(prompts: Prompts) -> bytes:
    proto = wire_model.model_to_proto(ready(prompts.fingerprint))
    # A value that the enum lacks.
    proto.stage = 99  # type: ignore[assignment]
    return proto.SerializeToString()


def _of(prompts: Prompts, **changes: Any) -> bytes:
    return wire_model.model_to_proto(ready(prompts.fingerprint, **changes)).SerializeToString()


def _not_finite(prompts: Prompts) -> bytes:
    drafter = DrafterInfo(
        "a",
        "ngram",
        Placement("local", "h", "cpu", (), None, ""),
        True,
        0,
        float("nan"),
        None,
        None,
    )
    return _of(prompts, drafters=(drafter,))


LIES: dict[str, Any] = {
    "garbage": lambda _: b"\xff" * 30,
    "no vocabulary": lambda prompts: _of(prompts, vocab_size=0),
    "a negative context": lambda prompts: _of(prompts, context_length=-1),
    "endless depth": lambda prompts: _of(prompts, max_draft_tokens=2**31 - 1),
    "rates that are no numbers": _not_finite,
}


@pytest.mark.parametrize(
    "lie", [pytest.param(lie, marks=[] if lie == "garbage" else pytest.mark.slow) for lie in LIES]
)
async def test_a_verifier_with_an_unreadable_answer_is_polled_again(
    pair: Pair, prompts: Prompts, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.upstream.routing")
    pair.liar.says = LIES[lie](prompts)
    await until(lambda: pair.problems[0] is Reason.VERIFIER_UNAVAILABLE)
    asked = pair.liar.asked
    await until(lambda: pair.liar.asked > asked + 3)
    assert (await pair.ask()).status_code == 200
    assert len(pair.second.requests) == 1
    ready_now = (await pair.http.get("/readyz")).json()
    assert ready_now["status"] == "degraded"
    assert "cannot be read" in ready_now["detail"]
    pair.liar.says = None
    await until(lambda: pair.problems == [None, None])
    # The gateway logs a change, not each poll.
    logged = [record.getMessage() for record in caplog.records]
    assert len([message for message in logged if "cannot be read" in message]) == 1


@pytest.mark.parametrize(
    "says", [_unknown_stage, lambda _: b""], ids=["of the future", "unspecified"]
)
async def test_a_verifier_in_an_unknown_stage_gets_no_requests(
    pair: Pair, prompts: Prompts, says: Any
) -> None:
    pair.liar.says = says(prompts)
    await until(lambda: pair.problems[0] is not None)
    assert (await pair.ask()).status_code == 200
    assert pair.first.requests == []
    pair.liar.says = None
    await until(lambda: pair.problems == [None, None])


def _part(**fields: Any) -> verifier_pb2.GenerateTokensResponse:
    return verifier_pb2.GenerateTokensResponse(**fields)


def _logprob(token: int) -> TokenLogprob:
    return TokenLogprob(-0.5, (token,), (-0.5,), 1)


def _ended(stats: SpeculationStats) -> TokenChunk:
    return TokenChunk([], [], finish_reason=FinishReason.LENGTH, stats=stats)


PLAIN = TokenSource.PLAIN
WRONG_CHUNKS: dict[str, TokenChunk] = {
    "a token that there is not": TokenChunk([4096], [PLAIN]),
    "the largest token": TokenChunk([5, 2**32 - 1], [PLAIN, PLAIN]),
    "more tokens than asked for": TokenChunk([5] * 2000, [PLAIN] * 2000),
    "no sources": TokenChunk([5], []),
    "too few log probabilities": TokenChunk([5, 6], [PLAIN, PLAIN], logprobs=[_logprob(5)]),
    "an alternative that there is not": TokenChunk([5], [PLAIN], logprobs=[_logprob(2**31)]),
    "an alternative in the prompt that there is not": TokenChunk(
        [5], [PLAIN], prompt_logprobs=[_logprob(4096)]
    ),
    "a log probability that is no number": TokenChunk(
        [5], [PLAIN], logprobs=[TokenLogprob(math.nan, (5,), (-0.5,), 1)]
    ),
    "an alternative's infinite log probability": TokenChunk(
        [5], [PLAIN], logprobs=[TokenLogprob(-0.5, (5,), (math.inf,), 1)]
    ),
    "an alternative without a log probability": TokenChunk(
        [5], [PLAIN], logprobs=[TokenLogprob(-0.5, (5, 6), (-0.5,), 1)]
    ),
    "fewer cached tokens than none": TokenChunk([5], [PLAIN], cached_token_count=-1),
    "fewer draft tokens than none": TokenChunk([5], [PLAIN], draft_token_count=-1),
    "fewer accepted tokens than none": _ended(SpeculationStats(accepted_token_count=-1)),
    "fewer drafts of a length than none": _ended(SpeculationStats(histogram=[1, -1])),
    "more draft tokens than any verifier has": _ended(SpeculationStats(max_draft_tokens=2**31 - 1)),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lie", WRONG_CHUNKS)
async def test_an_impossible_chunk_is_an_error(
    rig: Rig, lie: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rig.script.answer = lambda _: [WRONG_CHUNKS[lie], last([], FinishReason.LENGTH)]
    response = await rig.http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 4, "stream": stream}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    assert response.json()["error"]["message"].startswith("the verifier sent ")
    assert "verifier 127.0.0.1:" in caplog.text
    await until(lambda: rig.script.running == 0)
    assert not rig.gateway.router.replicas[0].sequences
    rig.script.answer = echo
    assert (await rig.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200


async def test_tokens_beyond_the_limit_end_a_stream_with_an_error(rig: Rig) -> None:
    rig.script.answer = lambda _: [plain([5, 5]), plain([5, 5, 5]), last([], FinishReason.LENGTH)]
    response = await rig.http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 4, "stream": True}
    )
    assert '"code":"internal"' in response.text
    assert "more tokens than it was asked for" in response.text
    assert response.text.endswith("}\n\ndata: [DONE]\n\n")


ENUMS = {
    "source": {"token_ids": [5], "sources": [77]},
    "finish reason": {
        "token_ids": [5],
        "sources": [common_pb2.TOKEN_SOURCE_PLAIN],
        "finish_reason": 77,
    },
    "rule": {"finish_reason": 1, "stats": common_pb2.SpeculationStats(rules=[77])},
}


@pytest.mark.parametrize(
    ("name", "ends"), [("source", "length"), ("finish reason", "stop"), ("rule", "stop")]
)
async def test_an_unknown_enum_value_fails_no_sequence(
    rig: Rig, name: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken for the value that the protos name."""
    rig.script.answer = lambda _: [1.0, plain([5]), last([], FinishReason.LENGTH)]
    other = asyncio.create_task(rig.http.post("/v1/completions", json={"prompt": "y"}))
    await until(lambda: rig.script.running == 1)
    rig.script.answer = lambda _: [plain([5]), last([], FinishReason.LENGTH)]
    unknown = iter([_part(**ENUMS[name])])
    known = wire_requests.chunk_to_proto
    with monkeypatch.context() as patch:
        patch.setattr(wire_requests, "chunk_to_proto", lambda c: next(unknown, None) or known(c))
        response = await rig.http.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 200
    assert response.json()["choices"][0]["finish_reason"] == ends
    assert (await other).status_code == 200
