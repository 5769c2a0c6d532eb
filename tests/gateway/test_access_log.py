"""Every HTTP or gRPC response, even a refusal or a fault, has an id and an access line."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gateway.text.prompts import Prompts
from outrider.process.observability import telemetry
from outrider.v1 import generation_pb2
from outrider.v1.generation_pb2 import GenerateTextRequest
from tests.gateway.gateway_rig import Rig
from tests.gateway.keyed_rig import ALICE, auth, entry, keyed_rig
from tests.gateway.scripted_verifier import plain
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

ANSWERS: list[tuple[str, str, Any, int]] = [
    ("POST", "/v1/completions", {"prompt": "x"}, 200),
    ("POST", "/v1/completions", {"prompt": "x", "stream": True}, 200),
    ("POST", "/v1/completions", {"prompt": 5}, 400),
    ("POST", "/v1/chat/completions", {"messages": []}, 400),
    ("POST", "/v1/messages", {"max_tokens": 1}, 400),
    ("POST", "/v1/responses", {}, 400),
    ("POST", "/tokenize", {"prompt": "x"}, 200),
    ("GET", "/v1/models", None, 200),
    ("GET", "/v1/models/none", None, 404),
    ("GET", "/nothing", None, 404),
    ("PUT", "/v1/models", None, 405),
    ("GET", "/", None, 200),
]


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the fields of the access lines so far."""
    return [vars(record)["fields"] for record in caplog.records if record.name == "gateway.access"]


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gateway.access")


@pytest.mark.parametrize(("method", "path", "body", "status"), ANSWERS)
async def test_a_response_over_http_has_an_id_and_a_line(
    rig: Rig,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    body: Any,
    status: int,
) -> None:
    for headers in ({}, {"X-Request-Id": "mine-1"}, {"X-Request-Id": "two words"}):
        caplog.clear()
        response = await rig.http.request(method, path, json=body, headers=headers)
        assert response.status_code == status
        found = response.headers["x-request-id"]
        assert (found == "mine-1") is (headers.get("X-Request-Id") == "mine-1")
        assert found not in ("", "two words")
        await until(lambda: lines(caplog))
        [line] = lines(caplog)
        assert (line["request_id"], line["status"]) == (found, str(status))
        assert (line["method"], line["path"]) == (method, path)
        assert line["client"] == "127.0.0.1"
        assert line["duration_seconds"] > 0
        if path.startswith("/v1/messages"):
            assert "error" in line
        else:
            error = response.json()["error"] if status >= 400 else {}
            assert line.get("error") == error.get("code")
        assert ("completion_tokens" in line) is (path == "/v1/completions" and status == 200)


async def test_a_line_has_the_usage_of_its_answer(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.says("if x")
    answer = await rig.http.post("/v1/completions", json={"prompt": "x y", "n": 2})
    usage = answer.json()["usage"]
    [line] = lines(caplog)
    assert line["prompt_tokens"] == usage["prompt_tokens"] > 0
    assert line["completion_tokens"] == usage["completion_tokens"] > 0
    assert line["model"] == "models/target"


async def test_a_client_that_leaves_has_a_line_with_its_tokens_so_far(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.script.answer = lambda _: [plain([5, 6]), 60.0]
    body = {"prompt": "x", "stream": True}
    async with rig.http.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_bytes())
    await until(lambda: lines(caplog))
    [line] = lines(caplog)
    assert (line["status"], line["error"], line["completion_tokens"]) == ("200", "client_gone", 2)


async def test_a_fault_of_ours_has_a_line_and_an_id(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.gateway.generation, "router", None)
    response = await rig.http.post(
        "/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"}
    )
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    assert response.json()["error"]["code"] == "internal"
    [line] = lines(caplog)
    assert (line["status"], line["error"], line["request_id"]) == ("500", "internal", "mine")


def counted(rig: Rig, status: int) -> float:
    """Return the metrics' count of responses with this status, over all routes."""
    [family] = rig.gateway.metrics.http_responses.collect()
    return sum(each.value for each in family.samples if each.labels["status"] == str(status))


async def raw(rig: Rig, request: bytes) -> str:
    """Send bytes that may not be HTTP; return the answer."""
    url = httpx.URL(rig.gateway.http_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer.decode()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx-request-id: mine\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"POST /v1/messages HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nnone\r\n", 400),
    ],
)
async def test_what_the_connection_refuses_has_one_line_and_an_id(
    rig: Rig, caplog: pytest.LogCaptureFixture, request_bytes: bytes, status: int
) -> None:
    before = counted(rig, status)
    answer = await raw(rig, request_bytes)
    assert answer.startswith(f"HTTP/1.1 {status} ")
    await until(lambda: lines(caplog))
    [line] = lines(caplog)
    assert line["status"] == str(status)
    assert f"x-request-id: {line['request_id']}\r\n" in answer
    assert (line["request_id"] == "mine") is (b"mine" in request_bytes)
    assert counted(rig, status) == before + 1


async def test_good_answers_to_probes_are_logged_at_debug_alone(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        assert (await rig.http.get(path)).headers["x-request-id"]
    assert lines(caplog) == []
    caplog.set_level(logging.DEBUG, "gateway.access")
    await rig.http.get("/livez")
    assert [line["path"] for line in lines(caplog)] == ["/livez"]


async def ended(call: Any) -> grpc.StatusCode:
    """Return the status of a call, once its whole answer was read."""
    with suppress(grpc.aio.AioRpcError):
        _ = [response async for response in call]
    code: grpc.StatusCode = await call.code()
    return code


@pytest.mark.parametrize(
    ("prompt", "status"), [("x", grpc.StatusCode.OK), ("", grpc.StatusCode.INVALID_ARGUMENT)]
)
async def test_a_call_over_grpc_has_an_id_and_a_line(
    rig: Rig, caplog: pytest.LogCaptureFixture, prompt: str, status: grpc.StatusCode
) -> None:
    for own in (None, "mine", "two words", "x" * 97):
        caplog.clear()
        call = rig.generation.GenerateText(
            generation_pb2.GenerateTextRequest(prompt=prompt),
            metadata=() if own is None else (("x-request-id", own),),
        )
        found = str(dict(await call.initial_metadata())["x-request-id"])
        assert await ended(call) is status
        assert found == "mine" if own == "mine" else found.startswith("text-")
        if prompt:
            assert rig.script.requests[-1].request_id == found
        await until(lambda: lines(caplog))
        [line] = lines(caplog)
        assert (line["request_id"], line["status"]) == (found, status.name)
        assert line["method"] == "gRPC"
        assert line["path"] == "/outrider.v1.GenerationService/GenerateText"


async def test_refused_keys_and_unknown_methods_have_lines_with_their_tenant(
    prompts: Prompts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with keyed_rig(prompts, tmp_path, [entry(ALICE, "alice")]) as rig:
        caplog.clear()
        await rig.http.post("/v1/completions", json={"prompt": "x"}, headers=auth(ALICE))
        await rig.http.post("/v1/completions", json={"prompt": "x"})
        request = generation_pb2.GenerateTextRequest(prompt="x")
        for key in (ALICE, "none"):
            call = rig.generation.GenerateText(request, metadata=tuple(auth(key).items()))
            await ended(call)
            assert "x-request-id" in dict(await call.initial_metadata())
        await until(lambda: len(lines(caplog)) == 4)
    found = [(line["status"], line["tenant"]) for line in lines(caplog)]
    assert found == [("200", "alice"), ("401", ""), ("OK", "alice"), ("UNAUTHENTICATED", "")]


def record(**extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("gateway.access", logging.INFO, "", 0, "response", (), None)
    vars(made).update(extra)
    return made


async def test_an_announcement_is_a_line_of_text_or_of_json_as_the_log_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    telemetry.announce("it serves")
    assert capsys.readouterr().out == "it serves\n"
    handler = logging.StreamHandler()
    handler.setFormatter(telemetry.JsonFormatter())
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    telemetry.announce("it serves")
    assert json.loads(capsys.readouterr().out)["message"] == "it serves"


async def test_a_line_is_text_with_quoted_values_or_one_json_object() -> None:
    fields = {"path": '/a b"\n', "status": 200, "tenant": "", "request_id": "mine"}
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    line = telemetry.TextFormatter("%(message)s").format(record(fields=fields, traceparent=trace))
    assert line == (
        'response path="/a b\\"\\n" status=200 tenant="" request_id=mine'
        f" trace_id={'a' * 32} span_id={'b' * 16}"
    )
    shown = json.loads(telemetry.JsonFormatter().format(record(fields=fields, traceparent=trace)))
    assert shown.pop("time").endswith("+00:00")
    assert shown == {
        "level": "info",
        "logger": "gateway.access",
        "message": "response",
        **fields,
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
    }


async def test_a_refused_call_of_grpc_has_a_line_with_its_reason(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for request in (GenerateTextRequest(), GenerateTextRequest(prompt="x", model="none")):
        with pytest.raises(grpc.aio.AioRpcError):
            await rig.generation.GenerateText(request).read()
    found = [(line["status"], line["error"]) for line in lines(caplog)]
    assert found == [("INVALID_ARGUMENT", "invalid_value"), ("NOT_FOUND", "model_not_found")]
