"""Compressed bodies are read within the limit of plain bodies; other encodings are refused."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx
import pytest

from gateway.http.ingress.request_body import MAX_BODY_BYTES
from tests.gateway.gateway_rig import Rig

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY = json.dumps({"prompt": "one two", "max_tokens": 16}).encode()


async def post(rig: Rig, content: Any, encoding: str) -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return await rig.http.post("/v1/completions", content=content, headers=headers)


def problem(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["message"]


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (gzip.compress(BODY, mtime=0), "gzip"),
        (gzip.compress(BODY, mtime=0), "X-Gzip"),
        (zlib.compress(BODY), "deflate"),
        (BODY, "identity"),
    ],
)
async def test_a_compressed_body_is_answered_like_a_plain_one(
    rig: Rig, content: bytes, encoding: str
) -> None:
    async def pieces() -> Any:
        for byte in content:
            yield bytes([byte])

    plain = await rig.http.post("/v1/completions", json=json.loads(BODY))
    for sent in (content, pieces()):
        answer = await post(rig, sent, encoding)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain.json()["choices"]


async def test_the_limit_holds_for_the_decompressed_body(rig: Rig) -> None:
    bomb = gzip.compress(b'{"prompt": "' + b" " * 50_000_000, mtime=0)
    assert len(bomb) < MAX_BODY_BYTES
    status, code, message = problem(await post(rig, bomb, "gzip"))
    assert (status, code) == (413, "request_too_large")
    assert message == f"the body is larger than {MAX_BODY_BYTES} bytes"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (BODY, "not in it"),
        (gzip.compress(BODY, mtime=0)[:-4], "too early"),
        (b"", "too early"),
        (gzip.compress(BODY, mtime=0) + b"{}", "after its end"),
    ],
    ids=["plain", "cut off", "empty", "longer"],
)
async def test_a_body_that_is_not_in_its_encoding_is_refused(
    rig: Rig, content: bytes, words: str
) -> None:
    status, code, message = problem(await post(rig, content, "gzip"))
    assert (status, code) == (400, "malformed_request")
    assert "Content-Encoding is gzip" in message
    assert words in message


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip"])
async def test_another_encoding_is_refused_by_name(rig: Rig, encoding: str) -> None:
    response = await post(rig, BODY, encoding)
    status, code, message = problem(response)
    assert (status, code) == (415, "unsupported_encoding")
    assert "Content-Encoding" in message
    assert repr(encoding) in message
    assert response.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize("padding", [0, 100_000], ids=["small", "large"])
@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "latin-1"]
)
async def test_json_in_another_encoding_than_utf_8_is_refused(
    rig: Rig, encoding: str, padding: int
) -> None:
    body = '{"prompt": "caf\u00e9", "max_tokens": 16}' + " " * padding
    headers = {"content-type": f"application/json; charset={encoding}"}
    answer = await rig.http.post("/v1/completions", content=body.encode(encoding), headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "JSON" in error["message"]
    headers = {"content-type": "application/json"}
    good = await rig.http.post("/v1/completions", content=body.encode("utf-8-sig"), headers=headers)
    assert good.status_code == 200, good.text
