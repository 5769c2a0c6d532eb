"""API keys: which callers are admitted, what each role sees, and how the file of keys is reread."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import pytest_asyncio

from gateway.access import keys
from gateway.access.gate import RequireKey, tenant_of
from gateway.access.key_file import new_key, write_keys
from gateway.access.keys import KeyRing
from gateway.text.prompts import Prompts
from outrider.errors import invalid
from outrider.v1 import generation_pb2
from tests.gateway.gateway_rig import Rig
from tests.gateway.keyed_rig import ALICE, BOB, EXPIRED, OPERATOR, auth, entry, keyed_rig
from tests.gateway.test_page_api import events
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODY = {"prompt": "if x", "temperature": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def keyed(prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    entries = [
        entry(ALICE, "alice"),
        entry(BOB, "bob"),
        entry(OPERATOR, "ops", role="operator"),
        entry(EXPIRED, "late", expires=datetime.now(UTC) - timedelta(seconds=1)),
    ]
    folder = tmp_path_factory.mktemp("keys")
    async with keyed_rig(prompts, folder, entries) as rig:
        yield rig


@pytest.mark.parametrize(
    ("authorization", "says"),
    [
        (None, "an API key is needed"),
        ("Bearer", "an API key is needed"),
        ("Bearer wrong", "not known here"),
        (f"Bearer {ALICE}x", "not known here"),
        (f"Digest {ALICE}", "an API key is needed"),
        ("Basic !!!", "an API key is needed"),
        ("Basic \xe9", "an API key is needed"),
        ("Basic /w==", "an API key is needed"),
        (f"Bearer {EXPIRED}", "has expired"),
    ],
    ids=[
        "no key",
        "no value",
        "unknown",
        "a letter more",
        "digest",
        "bad basic",
        "letter",
        "bytes",
        "expired",
    ],
)
async def test_a_request_without_a_valid_key_is_refused_in_openais_shape(
    keyed: Rig, authorization: str | None, says: str
) -> None:
    headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
    answer = await keyed.http.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert says in error["message"]
    for secret in (ALICE, BOB, OPERATOR, EXPIRED, "alice", "bob"):
        assert secret not in answer.text
    assert keyed.script.requests == []


async def test_a_keys_requests_carry_its_tenant_over_http_and_grpc(keyed: Rig) -> None:
    keyed.says("x")
    for headers in (auth(ALICE), basic(ALICE)):
        answer = await keyed.http.post("/v1/completions", json=BODY, headers=headers)
        assert answer.status_code == 200
    call = keyed.generation.GenerateText(
        generation_pb2.GenerateTextRequest(prompt="x"), metadata=list(auth(BOB).items())
    )
    _ = [response async for response in call]
    assert [request.tenant for request in keyed.script.requests[-3:]] == ["alice", "alice", "bob"]


def basic(key: str) -> dict[str, str]:
    return {"authorization": f"Basic {base64.b64encode(f'me:{key}'.encode()).decode()}"}


async def test_a_browser_is_asked_for_the_key_as_a_password(keyed: Rig) -> None:
    answer = await keyed.http.get("/")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Basic realm="Outrider"'
    assert (await keyed.http.get("/", headers=basic(ALICE))).status_code == 200
    answer = await keyed.http.post("/v1/completions", json=BODY)
    assert answer.headers["www-authenticate"] == 'Bearer realm="Outrider"'


async def test_no_websocket_gets_past_the_key(keyed: Rig) -> None:
    """The server takes no websocket. If it ever does, requests must not get around the checks."""
    sent: list[Any] = []
    inner: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def app(scope: Any, *_: Any) -> None:
        inner.append(scope)

    headers = [(b"authorization", f"Bearer {OPERATOR}".encode())]
    scope = {"type": "websocket", "path": "/livez", "headers": headers}
    await RequireKey(app, keyed.gateway.gate)(scope, Mock(), send)
    assert (sent, inner) == (["websocket.close"], [])


async def test_only_operators_see_the_processes(keyed: Rig) -> None:
    for headers in ({}, auth("wrong"), auth(ALICE)):
        body = (await keyed.http.get("/readyz", headers=headers)).json()
        assert body == {"status": "ready", "detail": "", "verifiers": []}
    body = (await keyed.http.get("/readyz", headers=auth(OPERATOR))).json()
    assert [verifier["ready"] for verifier in body["verifiers"]] == [True]


async def test_events_show_a_tenant_its_own_sums_alone(keyed: Rig) -> None:
    async def tokens(key: str) -> tuple[int, dict[str, Any]]:
        [state] = await events(keyed, 1, auth(key))
        return sum(state["activity"]["tokens"].values()), state

    before = {key: (await tokens(key))[0] for key in (ALICE, BOB, OPERATOR)}
    ids = keyed.says("if x: y")
    await keyed.http.post("/v1/completions", json=BODY, headers=auth(ALICE))
    after = {key: await tokens(key) for key in (ALICE, BOB, OPERATOR)}
    grown = {key: after[key][0] - before[key] for key in before}
    assert grown[ALICE] == grown[OPERATOR] >= len(ids)
    assert grown[BOB] == 0
    assert after[BOB][1]["readiness"]["verifiers"] == []
    assert after[OPERATOR][1]["readiness"]["verifiers"] != []


async def test_a_changed_file_is_read_again_and_a_bad_one_keeps_the_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    first, second = new_key(), new_key()
    write_keys(path, [entry(first, "a")])
    ring = KeyRing(path, "")
    assert ring.find(second) is None
    write_keys(path, [entry(second, "b")])
    await ring.reload()
    assert ring.find(first) is None
    assert ring.find(second) is not None
    for bad in ("keys: [", "keys: [{id: a}]", "\0"):
        path.write_text(bad)
        with caplog.at_level(logging.ERROR):
            await ring.reload()
        assert "the old keys stay in force" in caplog.text
        caplog.clear()
        assert ring.find(second) is not None
    path.unlink()
    await ring.reload()
    assert ring.find(second) is not None


async def test_a_file_that_could_not_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.yaml"
    write_keys(path, [entry(ALICE, "alice")])
    ring = KeyRing(path, "")
    monkeypatch.setattr(keys, "_RELOAD_S", 0.001)
    following = asyncio.create_task(ring.follow())
    refused = invalid("keys-file", "cannot be read: Permission denied")
    with monkeypatch.context() as patched:
        patched.setattr(keys, "read_keys", Mock(side_effect=refused))
        write_keys(path, [])
        await until(lambda: "the old keys stay in force" in caplog.text)
    # The gateway reads the file again though it has not changed: perhaps only a mode was wrong.
    await until(lambda: ring.find(ALICE) is None)
    following.cancel()
    assert caplog.text.count("the old keys stay in force") == 1


@pytest.mark.parametrize("role", ["tenant", "operator"])
async def test_events_end_once_the_key_is_revoked(
    prompts: Prompts, tmp_path: Path, role: str
) -> None:
    async with (
        asyncio.timeout(10),
        keyed_rig(prompts, tmp_path, [entry(ALICE, "alice", role=role)]) as rig,
        rig.http.stream("GET", "/events", headers=auth(ALICE)) as response,
    ):
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        write_keys(tmp_path / "keys.yaml", [])
        assert rig.gateway.gate.keys is not None
        await rig.gateway.gate.keys.reload()
        _ = [line async for line in lines]


async def test_a_preflight_needs_no_key(prompts: Prompts, tmp_path: Path) -> None:
    origin = "https://chat.example.com"
    entries = [entry(ALICE, "alice")]
    async with keyed_rig(prompts, tmp_path, entries, allowed_origins=[origin]) as rig:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        preflight = await rig.http.options("/v1/completions", headers=asked)
        assert preflight.status_code == 200
        refused = await rig.http.post("/v1/completions", json=BODY, headers={"origin": origin})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic b25l", "one"])
async def test_a_header_without_a_key_gives_the_default_tenant(value: str) -> None:
    assert tenant_of({"authorization": value}) == ""


async def test_without_keys_each_bearer_token_is_a_tenant(rig: Rig) -> None:
    for value in ("Bearer one", "Bearer two", "bearer one"):
        await rig.http.post("/v1/completions", json=BODY, headers={"authorization": value})
    await rig.http.post("/v1/completions", json=BODY)
    call = rig.generation.GenerateText(
        generation_pb2.GenerateTextRequest(prompt="x"), metadata=(("authorization", "Bearer one"),)
    )
    _ = [response async for response in call]
    first, second, again, none, by_grpc = [request.tenant for request in rig.script.requests]
    assert first == again == by_grpc == "key-" + hashlib.sha256(b"one").hexdigest()[:32]
    assert len({first, second, none}) == 3
    assert none == ""
