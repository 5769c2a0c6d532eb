"""`/openapi.json` is true: its limits are the enforced ones, and it lists each status and type."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_asyncio

from outrider.errors import OutriderError, Reason
from outrider.protocol.messages import FinishReason
from tests.gateway.gateway_rig import Rig
from tests.gateway.scripted_verifier import last, plain

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT: Any = [{"role": "user", "content": "hi"}]
ENDPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions": ("CompletionBody", {"prompt": "x"}),
    "/v1/chat/completions": ("ChatBody", {"messages": CHAT}),
    "/v1/responses": ("ResponsesBody", {"input": "x"}),
}
BODIES = {path: body for path, (_, body) in ENDPOINTS.items()}
BODIES["/v1/messages"] = {"messages": CHAT, "max_tokens": 5}
# Maps a parameter to other parameters, without which some of its documented values are refused.
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "max_tokens": {"prompt_logprobs": 0},
}
BESIDE["max_completion_tokens"] = BESIDE["max_tokens"]


@pytest_asyncio.fixture(loop_scope="session")
async def document(rig: Rig) -> Any:
    return (await rig.http.get("/openapi.json")).json()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/models/models/target",
        "/livez",
        "/readyz",
        "/health",
        "/ping",
        "/version",
        "/metrics",
        "/tokenizer_info",
    ],
)
async def test_get_and_head_have_the_documented_media_type(
    rig: Rig, document: Any, path: str
) -> None:
    documented = document["paths"]["/v1/models/{name}" if path.startswith("/v1/models/") else path][
        "get"
    ]
    expected = list(documented["responses"]["200"].get("content", {}))
    get, head = await rig.http.get(path), await rig.http.head(path)
    assert [get.headers.get("content-type")] == (expected or [None])
    assert head.headers.get("content-type") == get.headers.get("content-type")
    assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize(
    ("path", "stream"), [*zip(BODIES, (True, False, True, False), strict=True)]
)
async def test_each_error_that_occurs_is_documented(
    rig: Rig, document: Any, path: str, stream: bool
) -> None:
    documented = document["paths"][path]["post"]["responses"]
    body = {**BODIES[path], "stream": stream}
    for reason in (
        Reason.INVALID_VALUE,
        Reason.DRAFTER_NOT_FOUND,
        Reason.OVERLOADED,
        Reason.INTERNAL,
    ):
        rig.script.play(OutriderError(reason, "no"))
        answer = await rig.http.post(path, json=body)
        assert str(answer.status_code) in documented
    rig.script.answer = lambda _: [plain([5]), last([3], FinishReason.STOP)]
    answer = await rig.http.post(path, json=body)
    assert answer.headers["content-type"].partition(";")[0] in documented["200"]["content"]


def limits(schema: Any) -> list[tuple[str, Any, Any]]:
    """Return a body's limits as (parameter, last value within, first value beyond)."""
    return [
        (name, within, beyond)
        for name, parameter in schema["properties"].items()
        for within, beyond in [*number_limits(parameter), *length_limits(name, parameter)]
    ]


def number_limits(parameter: Any) -> list[tuple[Any, Any]]:
    kinds = parameter.get("anyOf", [parameter])
    whole = any(kind.get("type") == "integer" for kind in kinds)
    step = 1 if whole else 0.001
    # Maps a kind of limit to two steps from the limit: to the last value within, and to the first
    # value beyond.
    steps = {
        "minimum": (0, -step),
        "maximum": (0, step),
        "exclusiveMinimum": (step, 0),
        "exclusiveMaximum": (-step, 0),
    }
    as_type = int if whole else float
    return [
        (as_type(parameter[name]) + within, as_type(parameter[name]) + beyond)
        for name, (within, beyond) in steps.items()
        if name in parameter
    ]


def length_limits(name: str, parameter: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    if "maxItems" in parameter and name != "messages":
        item: Any = "x" if "choice" in name else 1
        most = parameter["maxItems"]
        found.append(([item] * most, [item] * (most + 1)))
    if "minItems" in parameter and "choice" in name:
        found.append((["x"], []))
    if "minLength" in parameter:
        found.append(("x", ""))
    return found


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_each_documented_limit_is_the_enforced_one(
    rig: Rig, document: Any, path: str
) -> None:
    rig.script.answer = lambda _: [last([], FinishReason.LENGTH)]
    schema, minimal = ENDPOINTS[path]
    checked = limits(document["components"]["schemas"][schema])
    checked += [
        (parent, {name: within}, {name: beyond})
        for parent, part in (
            ("speculation", "SpeculationBody"),
            ("structured_outputs", "StructuredOutputs"),
        )
        if parent in document["components"]["schemas"][schema]["properties"]
        for name, within, beyond in limits(document["components"]["schemas"][part])
    ]
    assert len(checked) > 25
    for name, within, beyond in checked:
        for value, expected in ((within, 200), (beyond, 400)):
            body = {**minimal, **BESIDE.get(name, {}), name: value}
            answer = await rig.http.post(
                path, content=json.dumps(body), headers={"content-type": "application/json"}
            )
            assert answer.status_code == expected, (name, value, answer.text)
