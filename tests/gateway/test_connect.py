"""Over Connect and gRPC-Web, GenerationService has the texts, errors and limits of gRPC."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import struct
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
from google.protobuf import json_format
from google.rpc import code_pb2, error_details_pb2, status_pb2

from gateway.http.ingress.request_body import MAX_BODY_BYTES
from gateway.rpc import connect
from gateway.rpc.connect import PATH
from gateway.rpc.servicer import MAX_MESSAGE_BYTES
from outrider.errors import OutriderError, Reason, Retry
from outrider.process.network import rpc_errors
from outrider.v1.common_pb2 import SamplingParams
from outrider.v1.generation_pb2 import GenerateTextRequest, GenerateTextResponse, TokenPrompt
from tests.gateway.gateway_rig import Rig
from tests.gateway.scripted_verifier import plain
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

JSON = "application/connect+json"
PROTO = "application/connect+proto"
WEB = "application/grpc-web+proto"
every_encoding = pytest.mark.parametrize("encoding", [JSON, PROTO, WEB])
TEXT = "def add(a, b):  # 😀"


def envelope(encoding: str, request: GenerateTextRequest) -> bytes:
    if encoding == JSON:
        return framed(json_format.MessageToJson(request).encode())
    return framed(request.SerializeToString())


def framed(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


async def frames(response: httpx.Response) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the frames of an answer as they arrive: flags and content."""
    buffer = b""
    async for data in response.aiter_bytes():
        buffer += data
        while len(buffer) >= 5 and len(buffer) >= (end := 5 + int.from_bytes(buffer[1:5], "big")):
            yield buffer[0], buffer[5:end]
            buffer = buffer[end:]
    assert buffer == b""


async def post(
    rig: Rig, encoding: str, body: bytes, **headers: str
) -> tuple[list[GenerateTextResponse], status_pb2.Status]:
    """Return the messages of a call, and its status."""
    messages = []
    ending = b""
    async with rig.http.stream(
        "POST", PATH, content=body, headers={"content-type": encoding, **headers}
    ) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, encoding)
        async for flags, data in frames(response):
            if flags:
                ending = data
            elif encoding == JSON:
                messages.append(json_format.Parse(data, GenerateTextResponse()))
            else:
                messages.append(GenerateTextResponse.FromString(data))
    return messages, web_status(ending) if encoding == WEB else connect_status(ending)


def web_status(ending: bytes) -> status_pb2.Status:
    trailers = dict(line.split(": ", 1) for line in ending.decode().splitlines())
    if details := trailers.get("grpc-status-details-bin"):
        return status_pb2.Status.FromString(base64.b64decode(details + "==="))
    return status_pb2.Status(
        code=int(trailers["grpc-status"]), message=trailers.get("grpc-message", "")
    )


def connect_status(ending: bytes) -> status_pb2.Status:
    error = json.loads(ending).get("error", {"code": "ok"})
    status = status_pb2.Status(
        code=code_pb2.Code.Value(error["code"].upper()), message=error.get("message", "")
    )
    for detail in error.get("details", ()):
        status.details.add(
            type_url=f"type.googleapis.com/{detail['type']}",
            value=base64.b64decode(detail["value"] + "==="),
        )
    return status


def reason(status: status_pb2.Status) -> Reason:
    return rpc_errors.error_in(status.SerializeToString(), otherwise=Reason.CLIENT_GONE).reason


def retry_class(status: status_pb2.Status) -> str:
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info.metadata["retry"]


@every_encoding
async def test_a_browser_gets_the_messages_that_grpc_gives(rig: Rig, encoding: str) -> None:
    rig.says(TEXT)
    request = GenerateTextRequest(prompt="x", max_tokens=30)
    messages, status = await post(rig, encoding, envelope(encoding, request))
    assert status.code == code_pb2.OK
    assert messages == [message async for message in rig.generation.GenerateText(request)]
    assert "".join(message.text for message in messages) == TEXT


@every_encoding
@pytest.mark.parametrize(
    "request_",
    [
        GenerateTextRequest(prompt="x", max_tokens=0),
        GenerateTextRequest(prompt="x", model="gpt"),
        GenerateTextRequest(prompt="x", stop=["full"]),
    ],
    ids=["no tokens", "unknown model", "the verifier is full"],
)
async def test_an_error_has_the_status_and_the_details_that_grpc_gives(
    rig: Rig, encoding: str, request_: GenerateTextRequest
) -> None:
    rig.script.answer = lambda _: [
        OutriderError(Reason.OVERLOADED, "full: 100 %\n", retry_after_s=2.5)
    ]
    messages, status = await post(rig, encoding, envelope(encoding, request_))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.generation.GenerateText(request_).read()
    assert messages == []
    assert (status.code, status.message) == (caught.value.code().value[0], caught.value.details())
    here = rpc_errors.error_in(status.SerializeToString())
    assert here == rpc_errors.error_of(caught.value)
    assert (here.field is None) == (here.retry_after_s is not None), (
        "an error has either a field or a time to retry"
    )


async def test_a_bug_of_the_gateway_is_logged_and_not_shown_to_the_caller(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encoding = JSON
    monkeypatch.setattr(rig.gateway.router, "lookup", lambda _: 1 / 0)
    _, status = await post(rig, encoding, envelope(encoding, GenerateTextRequest(prompt="x")))
    assert (status.code, reason(status)) == (code_pb2.INTERNAL, Reason.INTERNAL)
    assert "division" not in status.message
    assert caplog.text.count("division by zero") == 1


@every_encoding
async def test_a_deadline_ends_the_call_and_frees_its_sequence(rig: Rig, encoding: str) -> None:
    rig.script.answer = lambda _: [plain([5]), 60.0]
    deadline = {"grpc-timeout": "200m"} if encoding == WEB else {"connect-timeout-ms": "200"}
    messages, status = await post(
        rig, encoding, envelope(encoding, GenerateTextRequest(prompt="x")), **deadline
    )
    assert (len(messages), status.code) == (1, code_pb2.DEADLINE_EXCEEDED)
    await until(lambda: (rig.script.running, rig.script.cancelled) == (0, 1))


@every_encoding
async def test_a_browser_that_hangs_up_frees_its_sequence(rig: Rig, encoding: str) -> None:
    """Messages come one by one: the client has the first before the second is made."""
    rig.script.answer = lambda _: [plain([5]), 60.0]
    body = envelope(encoding, GenerateTextRequest(prompt="x"))
    arrived: list[bytes] = []

    async def read() -> None:
        headers = {"content-type": encoding}
        async with rig.http.stream("POST", PATH, content=body, headers=headers) as response:
            async for part in response.aiter_raw():
                arrived.append(part)

    browser = asyncio.create_task(read())
    await until(lambda: rig.script.running == 1 and len(arrived) > 0)
    browser.cancel()
    await until(lambda: (rig.script.running, rig.script.cancelled) == (0, 1))


async def test_http_headers_become_the_calls_metadata(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    encoding = PROTO
    headers = {"authorization": "Bearer key", "x-name": b"\xff\xfe".decode("latin-1")}
    body = envelope(encoding, GenerateTextRequest(prompt="x"))
    raw = [
        (name.encode(), value.encode("latin-1"))
        for name, value in {"content-type": encoding, **headers}.items()
    ]
    assert (await rig.http.post(PATH, content=body, headers=raw)).status_code == 200
    assert rig.script.requests[0].tenant.startswith("key-")
    assert caplog.text == ""


@every_encoding
async def test_a_request_larger_than_a_grpc_message_is_refused(rig: Rig, encoding: str) -> None:
    for size in (MAX_MESSAGE_BYTES + 1, MAX_BODY_BYTES + 1):
        request = GenerateTextRequest(prompt="x" * size)
        _, status = await post(rig, encoding, envelope(encoding, request))
        assert (status.code, rig.script.requests) == (code_pb2.RESOURCE_EXHAUSTED, [])
        assert (reason(status), retry_class(status)) == (Reason.REQUEST_TOO_LARGE, "never")
    request = GenerateTextRequest(prompt="x" * MAX_MESSAGE_BYTES)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [_ async for _ in rig.generation.GenerateText(request)]
    error = rpc_errors.error_of(caught.value)
    assert (error.reason, error.retry) == (Reason.REQUEST_TOO_LARGE, Retry.NEVER)


NEWER = GenerateTextRequest(
    prompt="x", sampling=SamplingParams(logit_bias={5: 0.5}), stop=["a"]
).SerializeToString()


def nested(number: int, content: bytes) -> bytes:
    """Return a field that holds a message of at most 127 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


@pytest.mark.parametrize("encoding", ["grpc", PROTO, WEB])
@pytest.mark.parametrize(
    ("data", "field", "number"),
    [
        (NEWER + b"\xf8\x07\x01", "127", 127),
        (NEWER + nested(6, b"\xf8\x07\x01"), "sampling.127", 127),
        (NEWER + nested(10, b"\x9a\x06\x02hi"), "grammar.99", 99),
        (
            nested(3, nested(1, b"\x0a\x04user") + nested(1, b"\x0a\x04user\x7a\x00")),
            "chat.messages[1].15",
            15,
        ),
    ],
)
async def test_a_field_of_a_later_version_is_refused_by_path_and_number(
    rig: Rig, encoding: str, data: bytes, field: str, number: int
) -> None:
    if encoding == "grpc":
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [_ async for _ in rig.generation.GenerateText(GenerateTextRequest.FromString(data))]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = rpc_errors.error_of(caught.value)
    else:
        _, status = await post(rig, encoding, framed(data))
        assert status.code == code_pb2.INVALID_ARGUMENT
        error = rpc_errors.error_in(status.SerializeToString())
    assert (error.reason, error.field) == (Reason.UNKNOWN_PARAMETER, field)
    assert f"the number {number}, which this version does not know" in error.message
    assert rig.script.requests == []


async def test_a_name_that_json_does_not_know_is_refused(rig: Rig) -> None:
    _, status = await post(rig, JSON, framed(b'{"prompt": "x", "sampling": {"xtc": 0.5}}'))
    error = rpc_errors.error_in(status.SerializeToString())
    assert status.code == code_pb2.INVALID_ARGUMENT
    assert (error.reason, error.field) == (Reason.UNKNOWN_PARAMETER, "sampling.xtc")


async def test_json_of_too_many_values_is_refused(rig: Rig) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connect, "MAX_JSON_VALUES", 1000)  # this gateway takes bodies of 64 KiB
        for count, refusal in ((900, None), (1001, Reason.REQUEST_TOO_LARGE)):
            _, status = await post(
                rig,
                JSON,
                envelope(JSON, GenerateTextRequest(tokens=TokenPrompt(token_ids=[7] * count))),
            )
            assert (reason(status) if status.code else None) is refusal
    assert len(rig.script.requests) == 1


@pytest.mark.parametrize(
    "encoding",
    ["application/json", "application/grpc-web-text", ""],
)
async def test_the_error_for_a_content_type_names_the_accepted_ones(
    rig: Rig, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await rig.http.post(PATH, content=b"{}", headers={"content-type": encoding})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed_request")
    assert JSON in answer.json()["error"]["message"]
    assert caplog.text == ""


async def test_the_access_line_names_a_refusals_reason(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.access")
    await post(rig, JSON, envelope(JSON, GenerateTextRequest(prompt="x", model="none")))
    await post(rig, JSON, framed(b"{"))
    records = [record for record in caplog.records if record.name == "gateway.access"]
    found = [vars(record)["fields"].get("error") for record in records]
    assert found == ["model_not_found", "malformed_request"]
