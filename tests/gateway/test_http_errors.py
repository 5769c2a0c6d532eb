"""Errors have OpenAI's shape, name the field and the limit, and affect no other request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from gateway.http.ingress.request_body import MAX_BODY_BYTES
from outrider.errors import OutriderError, Reason
from tests.gateway.gateway_rig import Rig, events_of
from tests.gateway.scripted_verifier import plain
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


# (changes to a good body, param, code, a part of the message)
BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"prompt": ""}, "prompt", "invalid_value", "at least 1 token"),
    ({"prompt": []}, "prompt", "invalid_value", "none empty"),
    ({"prompt": ["x", 3]}, "prompt", "invalid_value", "list of strings"),
    ({"prompt": {"a": 1}}, "prompt", "invalid_value", "must be a string"),
    ({"prompt": "\ud800"}, "prompt", "invalid_value", "surrogate"),
    ({"prompt": [4096]}, "prompt", "invalid_value", "[0, 4096), not 4096"),
    ({"prompt": [2**33], "echo": True}, "prompt", "invalid_value", "[0, 4096), not 8589934592"),
    ({"regex": "a"}, "regex", "unsupported_parameter", "use structured_outputs.regex"),
    (
        {"speculation": {"drafter_id": "\ud800"}},
        "speculation.drafter_id",
        "invalid_value",
        "surrogate",
    ),
    ({"repetition_penalty": 1e-38}, "repetition_penalty", "invalid_value", "[0.01, 10], not 1e-38"),
    ({"prompt": [5] * 2048}, "prompt", "context_length_exceeded", "2048 tokens"),
    ({"prompt": ["x"] * 9, "n": 8}, "n", "invalid_value", "at most 64"),
    ({"n": 10**30}, "n", "invalid_value", "[1, 64]"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", "at least 1, not 0"),
    (
        {"max_tokens": 10**30},
        "max_tokens",
        "context_length_exceeded",
        "This model's maximum context length is 2048 tokens. max_tokens asks",
    ),
    ({"max_tokens": "7"}, "max_tokens", "invalid_value", "valid integer"),
    ({"temperature": True}, "temperature", "invalid_value", "valid number"),
    ({"seed": 2**64}, "seed", "invalid_value", "must be in"),
    ({"stop": [""]}, "stop[0]", "invalid_value", "1 to 256 characters"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value", "at most 16 strings, not 17"),
    ({"stop_token_ids": [4096]}, "stop_token_ids[0]", "invalid_value", "[0, 4096)"),
    ({"speculation": {"drafter_id": "x" * 129}}, "speculation.drafter_id", "invalid_value", "128"),
    (
        {"speculation": {"drafter_id": "a", "drafter_family": "b"}},
        "speculation.drafter_family",
        "invalid_value",
        "together with speculation.drafter_id",
    ),
    (
        {"speculation": {"drafter": "ngram"}},
        "speculation.drafter",
        "unknown_parameter",
        "not a parameter",
    ),
    (
        {"stream_options": {"include_usage": True}},
        "stream_options",
        "invalid_value",
        "stream: true",
    ),
    ({"temprature": 1}, "temprature", "unknown_parameter", "not a parameter"),
    ({"model": "gpt-5"}, "model", "model_not_found", "the names here are models/target"),
]


@pytest.mark.parametrize(
    ("body", "param", "code", "words"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40]
)
async def test_a_bad_parameter_is_named_with_its_limit(
    rig: Rig, body: dict[str, Any], param: str, code: str, words: str
) -> None:
    response = await rig.http.post(
        "/v1/completions", content=json.dumps({"prompt": "x"} | body), headers=JSON
    )
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert words in error["message"]
    assert response.status_code == (404 if code == "model_not_found" else 400)
    assert rig.script.requests == []


UNSUPPORTED = {
    "audio": {},
    "best_of": 2,
    "function_call": "auto",
    "functions": [{}],
    "modalities": ["audio"],
    "skip_special_tokens": False,
    "suffix": "x",
    "web_search_options": {},
}


async def test_an_unsupported_parameter_is_refused_not_ignored(rig: Rig) -> None:
    for name, value in UNSUPPORTED.items():
        response = await rig.http.post("/v1/chat/completions", json={"messages": CHAT, name: value})
        error = error_of(response)
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0]"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"messages": [*CHAT, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].id",
    ),
    ({"messages": [{"role": "user", "content": "x" * 60_000}]}, "messages"),
    ({"max_completion_tokens": 4000}, "max_completion_tokens"),
    ({"max_completion_tokens": 4, "max_tokens": 4}, "max_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"4096": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"banned_token_ids": [4096]}, "banned_token_ids"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "max_tokens": -1}, "max_tokens"),
    ({"speculation": {"acceptance": "sloppy"}}, "speculation.acceptance"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
    ),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "diff", "content": "x"}}, "prediction.type"),
]


@pytest.mark.parametrize(("body", "param"), BAD_CHATS, ids=lambda value: str(value)[:60])
async def test_a_bad_chat_names_the_place(rig: Rig, body: dict[str, Any], param: str) -> None:
    content = json.dumps({"messages": CHAT} | body)
    response = await rig.http.post("/v1/chat/completions", content=content, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert rig.script.requests == []


@pytest.mark.parametrize(
    ("content", "headers", "words"),
    [
        (b'{"prompt": "x', JSON, "not JSON: Unterminated string starting at (character 11)"),
        (b"", JSON, "JSON object"),
        (b"[1]", JSON, "JSON object"),
        (b'{"prompt": ' + b"[" * 60_000, JSON, "JSON"),
        (b'{"n": ' + b"9" * 60_000 + b"}", JSON, "JSON"),
        (b'{"prompt": "\xff"}', JSON, "JSON"),
        (b'{"prompt": "x"}', {"content-type": "text/plain"}, "Content-Type"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_the_error_for_a_malformed_body_says_why(
    rig: Rig, content: bytes, headers: dict[str, str], words: str
) -> None:
    response = await rig.http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] in ("malformed_request", "invalid_value")
    assert words in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/v1/chat/completions", {}, {"type": "input_audio", "input_audio": {}}),
        ("/v1/messages", {"max_tokens": 4}, {"type": "image", "source": {}}),
        ("/v1/responses", {}, {"type": "input_image", "image_url": "data:"}),
    ],
)
async def test_every_api_says_of_an_image_that_the_model_takes_text_only(
    rig: Rig, path: str, body: dict[str, Any], part: dict[str, Any]
) -> None:
    name = "input" if path == "/v1/responses" else "messages"
    message = {"role": "user", "content": [part]}
    response = await rig.http.post(path, json=body | {"model": "m", name: [message]})
    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith(": the model takes text only")


@pytest.mark.parametrize(
    ("kind", "why"), [("image_url", ": the model takes text only"), ("tex", "")]
)
async def test_a_part_of_another_type_is_refused_with_the_types_that_are_taken(
    rig: Rig, kind: str, why: str
) -> None:
    content = [{"type": kind, kind: {"url": "data:"}}]
    body = {"messages": [{"role": "user", "content": content}]}
    response = await rig.http.post("/v1/chat/completions", json=body)
    said = f"messages[0].content[0].type must be one of 'text', 'refusal', not '{kind}'{why}"
    assert error_of(response)["message"] == said


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/completion", " (did you mean /v1/completions?)"),
        ("/v1/chat/completion", " (did you mean /v1/chat/completions?)"),
        ("/v1/model", " (did you mean /v1/models?)"),
        *(
            (path, f"; the path is /v1{path}, so a client's base URL ends in /v1")
            for path in ("/chat/completions", "/completions", "/messages", "/models")
        ),
    ],
)
async def test_the_error_for_a_wrong_path_names_the_right_one(
    rig: Rig, path: str, hint: str
) -> None:
    response = await rig.http.post(path, json={})
    assert response.status_code == 404
    assert error_of(response)["message"] == f"there is no {path} here{hint}"


async def test_numbers_that_are_not_finite_are_refused(rig: Rig) -> None:
    for number in ("NaN", "-Infinity", "1e999"):
        response = await rig.http.post(
            "/v1/completions", content=f'{{"prompt": "x", "top_p": {number}}}', headers=JSON
        )
        assert (response.status_code, error_of(response)["param"]) == (400, "top_p")


async def test_a_body_over_the_limit_is_refused_with_or_without_a_length(rig: Rig) -> None:
    async def parts() -> Any:
        for _ in range(5):
            yield b"x" * 1_000_000

    for content in (b"x" * (MAX_BODY_BYTES + 1), parts()):
        response = await rig.http.post("/v1/completions", content=content, headers=JSON)
        assert response.status_code == 413
        assert error_of(response)["message"] == f"the body is larger than {MAX_BODY_BYTES} bytes"


async def test_errors_for_unknown_routes_and_methods_have_openais_shape(rig: Rig) -> None:
    missing = await rig.http.get("/v1/nothing")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "route_not_found")
    wrong = await rig.http.get("/v1/completions")
    assert wrong.status_code == 405
    assert error_of(wrong)["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"
    model = await rig.http.get("/v1/models/gpt")
    assert (model.status_code, error_of(model)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("reason", "status", "stream"), [(Reason.OVERLOADED, 429, True), (Reason.INTERNAL, 500, False)]
)
async def test_the_verifiers_errors_have_their_own_http_status(
    rig: Rig, reason: Reason, status: int, stream: bool
) -> None:
    rig.script.answer = lambda _: [
        OutriderError(reason, "because", "speculation.drafter_id", retry_after_s=3.0)
    ]
    response = await rig.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (status, "3")
    error = error_of(response)
    assert error["message"] == "because"
    assert error["code"] == reason.name.lower()
    assert error["param"] == "speculation.drafter_id"


async def test_a_failure_in_mid_stream_is_the_last_event_before_done(rig: Rig) -> None:
    rig.script.answer = lambda request: [
        plain([5]),
        OutriderError(Reason.INTERNAL, "the target's forward failed"),
    ]
    response = await rig.http.post("/v1/completions", json={"prompt": "x", "stream": True, "n": 3})
    *texts, error = events_of(response)
    assert texts
    assert error == {
        "error": {
            "message": "the target's forward failed",
            "type": "internal_server_error",
            "param": None,
            "code": "internal",
        }
    }


async def test_one_failed_choice_fails_the_request_and_cancels_its_siblings(rig: Rig) -> None:
    def answer(request: Any) -> list[Any]:
        failed = request.sampling.seed == 1
        return [0.05, OutriderError(Reason.INTERNAL, "broken")] if failed else [plain([5]), 60.0]

    rig.script.answer = answer
    response = await rig.http.post("/v1/completions", json={"prompt": "x", "n": 3, "seed": 0})
    assert (response.status_code, error_of(response)["message"]) == (500, "broken")
    await until(lambda: not rig.script.running)
