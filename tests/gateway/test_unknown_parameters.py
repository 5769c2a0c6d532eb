"""Parameters without effect are ignored. A setting decides if unknown parameters are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from gateway.text.prompts import Prompts
from tests.gateway.gateway_rig import Rig, own_rig

pytestmark = pytest.mark.asyncio(loop_scope="session")
CHAT = [{"role": "user", "content": "hi"}]
HARMLESS: list[dict[str, Any]] = [
    {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "priority",
        "verbosity": "high",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "skip_special_tokens": True,
        "request_id": "r",
        "priority": 0,
        "guided_decoding_backend": "outlines",
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "modalities": ["text"],
    },
    {"functions": [{"name": "f"}], "function_call": "none"},
    {"tools": [], "logit_bias": {}, "logprobs": False, "stop": None},
    {"reasoning_effort": "none", "prompt_cache_options": {"mode": "implicit"}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {
        "use_beam_search": False,
        "length_penalty": 1,
        "documents": [],
        "chat_template": None,
        "truncate_prompt_tokens": None,
        "cache_salt": "s",
        "echo": False,
        "allowed_token_ids": None,
        "mm_processor_kwargs": None,
        "return_tokens_as_token_ids": False,
        "logits_processors": None,
        "kv_transfer_params": None,
        "vllm_xargs": {},
        "stream_reasoning": True,
    },
    {"add_generation_prompt": True, "response_format": {"type": "text"}, "store": False},
]


@pytest_asyncio.fixture(loop_scope="session")
async def lenient(prompts: Prompts) -> AsyncIterator[Rig]:
    """Yield a gateway that ignores unknown parameters."""
    async with own_rig(prompts, unknown_parameters="ignore") as rig:
        yield rig


async def test_harmless_parameters_change_nothing(rig: Rig) -> None:
    body = {"messages": CHAT, "temperature": 0}
    for harmless in ({}, *HARMLESS):
        response = await rig.http.post("/v1/chat/completions", json=body | harmless)
        assert response.status_code == 200, response.text
    plain, *decorated = [
        replace(request, request_id="", noise_seed=0) for request in rig.script.requests
    ]
    assert decorated == [plain] * len(HARMLESS)


async def test_cached_parts_and_padded_streams_are_taken(rig: Rig) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    body = {
        "messages": [{"role": "user", "content": [part]}],
        "stream": True,
        "stream_options": {"include_obfuscation": True},
    }
    assert (await rig.http.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a"}}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
async def test_other_bodies_take_what_changes_nothing(
    rig: Rig, path: str, body: dict[str, Any]
) -> None:
    neutral: dict[str, Any] = {"mm_processor_kwargs": None, "use_beam_search": False}
    if "structured_outputs" in body:
        body["structured_outputs"] |= {"disable_fallback": False, "whitespace_pattern": None}
    answer = await rig.http.post(path, json=body | neutral)
    assert answer.status_code == 200, answer.text
    refused = await rig.http.post(path, json=body | {"use_beam_search": True})
    assert refused.json()["error"]["code"] == "unsupported_parameter"


STRANGE = {"top_a": 0.2, "stream_options": {"x": 1}, "stream": True}


async def test_unknown_parameters_are_refused_by_default(rig: Rig) -> None:
    response = await rig.http.post("/v1/chat/completions", json={"messages": CHAT} | STRANGE)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    ("path", "parameter", "meant"),
    [
        ("/v1/chat/completions", "max_token", "max_tokens"),
        ("/v1/completions", "temprature", "temperature"),
        ("/v1/messages", "top-k", "top_k"),
    ],
)
async def test_a_misspelt_parameter_is_named_with_the_right_one(
    rig: Rig, path: str, parameter: str, meant: str
) -> None:
    asked = {"prompt": "hi"} if path == "/v1/completions" else {"messages": CHAT}
    body = {"model": "m", "max_tokens": 4, parameter: 1} | asked
    response = await rig.http.post(path, json=body)
    assert response.status_code == 400
    said = f"{parameter} is not a parameter of this request (did you mean {meant}?)"
    assert response.json()["error"]["message"] == said


async def test_a_misspelt_field_of_an_object_is_named_with_the_right_one(rig: Rig) -> None:
    body = {"messages": CHAT, "speculation": {"draft_token": 4}}
    response = await rig.http.post("/v1/chat/completions", json=body)
    said = "speculation.draft_token is not a parameter of this request (did you mean draft_tokens?)"
    assert response.json()["error"]["message"] == said


async def test_unknown_parameters_are_ignored_if_the_operator_says_so(lenient: Rig) -> None:
    response = await lenient.http.post("/v1/chat/completions", json={"messages": CHAT} | STRANGE)
    assert response.status_code == 200, response.text


async def test_a_known_parameter_that_would_change_the_answer_is_still_refused(
    lenient: Rig,
) -> None:
    changing: dict[str, Any] = {
        "best_of": 2,
        "skip_special_tokens": False,
        "temperature": "hot",
        "use_beam_search": True,
        "length_penalty": 0.5,
        "documents": [{"text": "t"}],
        "truncate_prompt_tokens": 8,
        "chat_template": "{{ messages }}",
    }
    for name, value in changing.items():
        body = {"messages": CHAT, name: value}
        response = await lenient.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
