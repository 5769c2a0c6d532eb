"""A model is served under each of its names, in every API; answers show the first name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from outrider.v1 import generation_pb2
from tests.gateway.gateway_rig import Rig
from tests.waiting import until
from verifier_svc.config import VerifierSettings

pytestmark = pytest.mark.asyncio(loop_scope="session")

OWN, FURTHER = "models/target", ("claude-opus-4-1", "claude-3-5-haiku-latest")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
}
COUNTS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest_asyncio.fixture(loop_scope="session")
async def named(rig: Rig) -> AsyncIterator[Rig]:
    """Yield a gateway whose verifier's model has three names."""
    rig.script.info = replace(rig.script.info, aliases=FURTHER)
    await until(lambda: rig.gateway.router.replicas[0].info == rig.script.info)
    rig.says("yes")
    yield rig


@pytest.mark.parametrize("name", [OWN, *FURTHER])
async def test_every_api_takes_every_name_and_answers_with_the_first(named: Rig, name: str) -> None:
    for path, body in BODIES.items():
        answer = await named.http.post(path, json=body | {"model": name})
        assert (path, answer.status_code) == (path, 200)
        assert answer.json()["model"] == OWN
    for path, body in COUNTS.items():
        answer = await named.http.post(path, json=body | {"model": name})
        assert (path, answer.status_code) == (path, 200)
    request = generation_pb2.GenerateTextRequest(prompt="x", model=name)
    assert "".join([part.text async for part in named.generation.GenerateText(request)]) == "yes"


async def test_all_names_are_listed_with_the_models_own_name(named: Rig) -> None:
    listed = (await named.http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["root"]) for each in listed] == [
        (name, OWN) for name in (OWN, *FURTHER)
    ]
    assert (await named.http.get(f"/v1/models/{FURTHER[1]}")).json()["root"] == OWN


async def test_an_unknown_name_is_answered_with_all_names(named: Rig) -> None:
    body = {"model": "gpt-4", "prompt": "x"}
    answer = await named.http.post("/v1/completions", json=body)
    assert answer.status_code == 404
    assert all(name in answer.json()["error"]["message"] for name in (OWN, *FURTHER))


@pytest.mark.parametrize(
    ("given", "names"),
    [([], ["m"]), (["a"], ["a"]), (["a", "b, c", "a"], ["a", "b", "c"]), ([""], ["m"])],
)
async def test_names_are_repeated_or_separated_by_commas(
    given: list[str], names: list[str]
) -> None:
    assert VerifierSettings(target="m", model_name=given).served_names == names
