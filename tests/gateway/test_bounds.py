"""Requests that would take long to read are refused by size before they are read."""

from __future__ import annotations

import json
import random
from typing import Any

import grpc
import httpx
import pytest

from gateway.http.ingress.fields import MAX_KEYS
from gateway.http.ingress.json_size import MAX_STRINGS, MAX_VALUES, check_size
from gateway.http.openai.schema import MAX_SEQUENCES
from gateway.text.prompts import Prompts
from outrider.errors import OutriderError, Reason
from outrider.process.network import rpc_errors
from outrider.protocol.limits import MAX_MESSAGES
from outrider.v1 import generation_pb2
from tests.gateway.gateway_rig import Rig

pytestmark = pytest.mark.asyncio(loop_scope="session")

JSON = {"content-type": "application/json"}
# The context of the rig's verifier, in tokens.
CONTEXT = 2048


def error_of(response: httpx.Response) -> dict[str, Any]:
    return response.json()["error"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[" + b"0," * MAX_VALUES + b"0]", f"{MAX_VALUES} values"),
        (b'{"a": "\\"[,"' + b', "b": {}' * MAX_VALUES + b"}", f"{MAX_STRINGS} strings"),
        (b"[" + b"{}," * (MAX_VALUES // 2) + b"0]", f"{MAX_VALUES} values"),
        (b"[" + b'"",' * MAX_STRINGS + b'""]', f"{MAX_STRINGS} strings"),
        (b"{" + b'"\\\\":0,' * MAX_STRINGS + b'"":0}', f"{MAX_STRINGS} strings"),
    ],
    ids=["numbers", "objects with keys", "empty objects", "strings", "keys"],
)
async def test_a_body_of_too_many_values_is_refused_before_parsing(
    content: bytes, words: str
) -> None:
    with pytest.raises(OutriderError, match=words) as caught:
        check_size(content)
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE


@pytest.mark.parametrize(
    "value",
    [
        "a, [b], {c}: d" * 100_000,
        '\\"' * 500_000,
        "\\" * 500_001,
        ['",[{\\'] * MAX_STRINGS,
        list(range(MAX_VALUES - 1)),
    ],
    ids=["a text with commas", "quotation marks", "backslashes", "strings of marks", "numbers"],
)
async def test_marks_inside_strings_are_not_counted_as_values(value: object) -> None:
    check_size(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({f"k{number}": 1 for number in range(MAX_KEYS + 1)}, f"more than {MAX_KEYS}"),
        (
            {"speculation": {f"k{number}": 1 for number in range(MAX_KEYS + 1)}},
            f"more than {MAX_KEYS}",
        ),
        ({"logit_bias": {str(number): 1.0 for number in range(1025)}}, "1024"),
        ({"metadata": {str(number): "" for number in range(1025)}}, "1024"),
        ({"stop": [1] * 10_000}, "stop[0]"),
        ({"prompt": ["x"] * (MAX_SEQUENCES + 1)}, f"at most {MAX_SEQUENCES} prompts"),
    ],
)
async def test_lists_and_objects_are_bounded_in_length(
    rig: Rig, body: dict[str, Any], words: str
) -> None:
    response = await rig.http.post("/v1/completions", json={"prompt": "x"} | body)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_value")
    assert words in error_of(response)["message"]
    assert len(response.content) < 500


@pytest.mark.parametrize("length", [200_000, 2_000_000])
async def test_a_text_that_is_only_tokenised_may_exceed_the_context_up_to_a_limit(
    rig: Rig, length: int
) -> None:
    text = "x " * length
    for field, value in (("prompt", text), ("messages", [{"role": "user", "content": text}])):
        error = error_of(await rig.http.post("/tokenize", json={field: value}))
        assert error["message"] == f"{field} must have at most 65536 tokens"
        assert error["code"] == "invalid_value"


async def test_messages_are_bounded_in_number(rig: Rig) -> None:
    message = {"role": "user", "content": ""}
    for path in ("/v1/chat/completions", "/tokenize"):
        response = await rig.http.post(path, json={"messages": [message] * (MAX_MESSAGES + 1)})
        assert (response.status_code, error_of(response)["param"]) == (400, "messages")
        assert str(MAX_MESSAGES) in error_of(response)["message"]
    too_many = generation_pb2.Chat(
        messages=[generation_pb2.ChatMessage(role="user")] * (MAX_MESSAGES + 1)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(
            aiter(rig.generation.GenerateText(generation_pb2.GenerateTextRequest(chat=too_many)))
        )
    assert rpc_errors.error_of(caught.value).field == "chat.messages"


async def test_a_far_too_long_prompt_is_refused_before_tokenising(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(map(len, prompts.tokenizer.get_vocab()))
    with monkeypatch.context() as patch:
        patch.setattr(prompts, "tokenizer", None)
        for attempt in (
            prompts.encode("a" * (CONTEXT * longest + 1), "prompt", CONTEXT),
            prompts.render(
                [{"role": "user", "content": "a" * CONTEXT}] * (longest + 1), "prompt", CONTEXT, "a"
            ),
        ):
            with pytest.raises(OutriderError, match=f"{CONTEXT} tokens") as caught:
                await attempt
            assert caught.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
            assert caught.value.field == "prompt"


async def test_a_prompt_that_just_fits_is_accepted_whatever_its_tokens(prompts: Prompts) -> None:
    names = sorted(prompts.tokenizer.get_vocab(), key=len)
    draw = random.Random(5)
    for kinds in (names[-3:], names[:40], names):
        chosen: list[Any] = [
            prompts.tokenizer.token_to_id(draw.choice(kinds)) for _ in range(20_000)
        ]
        text = prompts.decode(chosen)
        ids = prompts.tokenizer.encode(text).ids
        assert await prompts.encode(text, "prompt", len(ids)) == ids
        with pytest.raises(OutriderError, match=f"{len(ids)} tokens"):
            await prompts.encode(text, "prompt", len(ids) - 1)


async def test_only_the_beginning_of_a_prediction_is_tokenised(prompts: Prompts) -> None:
    text = "one two three four " * 10_000
    ids = await prompts.encode_start(text, CONTEXT)
    assert len(ids) == CONTEXT
    assert text.startswith(prompts.decode(ids[:-2]))
    assert (
        await prompts.encode_start("one two", 99)
        == prompts.tokenizer.encode("one two", add_special_tokens=False).ids
    )


async def test_an_error_shows_only_the_beginning_of_what_is_wrong(rig: Rig) -> None:
    for body in (
        {"k" * 30_000: 1},
        {"speculation": {"k" * 30_000: 1}},
        {"temperature": "v" * 30_000},
        {"temperature": {"v" * 30_000: 1}},
        {"temperature": list(range(5000))},
    ):
        response = await rig.http.post("/v1/completions", json={"prompt": "x"} | body)
        assert response.status_code == 400
        assert len(response.content) < 500
    wrong = await rig.http.request("PUT", "/v1/completions" + "a" * 30_000)
    assert len(wrong.content) < 500


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","\\ud800":1}',
        b'{"prompt":"a","speculation":{"\\udfff":1}}',
        b'{"messages":[{"\\ud800":1}]}',
    ],
)
async def test_a_key_that_is_not_unicode_is_refused(rig: Rig, body: bytes) -> None:
    path = "/v1/chat/completions" if b"messages" in body else "/v1/completions"
    response = await rig.http.post(path, content=body, headers=JSON)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_value")
    assert "half of a surrogate pair" in error_of(response)["message"]
    assert "\\ud" in error_of(response)["message"]
