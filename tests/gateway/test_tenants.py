"""Requests with the same API key have the same tenant, and others do not."""

from __future__ import annotations

import hashlib

import pytest
from gateway_rig import Rig

from gateway.access.gate import tenant_of
from outrider.v1 import generation_pb2


async def tenants(rig: Rig, *headers: dict[str, str]) -> list[str]:
    rig.says("x")
    start = len(rig.script.requests)
    for given in headers:
        await rig.http.post("/v1/completions", json={"prompt": "x"}, headers=given)
    return [request.tenant for request in rig.script.requests[start:]]


@pytest.mark.asyncio(loop_scope="session")
async def test_each_api_key_is_a_tenant(
    rig: Rig,
) -> None:
    first, second, again, none = await tenants(
        rig,
        {"authorization": "Bearer one"},
        {"authorization": "Bearer two"},
        {"Authorization": "bearer one"},
        {},
    )
    assert len({first, second, none}) == 3
    assert (again, none) == (first, "")
    assert first == "key-" + hashlib.sha256(b"one").hexdigest()[:32]
    call = rig.generation.GenerateText(
        generation_pb2.GenerateTextRequest(prompt="x"), metadata=(("authorization", "Bearer one"),)
    )
    _ = [response async for response in call]
    assert rig.script.requests[-1].tenant == first


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic b25l", "one"])
def test_a_header_without_a_key_gives_the_default_tenant(value: str) -> None:
    assert tenant_of({"authorization": value}) == ""
