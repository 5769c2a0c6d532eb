"""If a verifier fails before a sequence's first chunk, the sequence moves to another verifier."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from gateway.text.prompts import Prompts
from gateway.upstream.routing import Pick
from outrider.errors import OutriderError, Reason
from tests.gateway.gateway_rig import echo
from tests.gateway.mortal_verifiers import Site, running_site
from tests.gateway.scripted_verifier import Script
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def site(prompts: Prompts) -> AsyncIterator[Site]:
    """Yield a gateway that does not poll its verifiers: it must learn of changes from requests."""
    async with running_site(prompts, poll_s=60.0) as made:
        for verifier in (made.first, made.second):
            verifier.script.answer = echo
        yield made


LEAVES = OutriderError(Reason.DRAINING, "not now", retry_after_s=1.0)


def refuse(script: Script, error: OutriderError) -> None:
    """Let a verifier answer requests and polls with an error."""
    script.answer = lambda _: [error]
    script.refusal = error


@pytest.mark.parametrize(("reason", "stream"), [(Reason.DRAINING, True), (Reason.NOT_READY, False)])
async def test_a_verifier_that_refuses_requests_costs_no_request(
    site: Site, reason: Reason, stream: bool
) -> None:
    refuse(site.first.script, OutriderError(reason, "not now", retry_after_s=1.0))
    for _ in range(3):
        response = await site.ask(prompt="if x", stream=stream)
        assert response.status_code == 200
        assert "if x" in response.text
    # The gateway does not try the refusing verifier a second time.
    assert (len(site.first.script.requests), len(site.second.script.requests)) == (1, 3)
    lines = (await site.http.get("/metrics")).text.splitlines()
    failures = [line for line in lines if line.startswith("outrider:request_failure_total{")]
    assert {line.split()[-1] for line in failures} == {"0.0"}


async def test_when_all_verifiers_refuse_the_last_error_is_reported(site: Site) -> None:
    refuse(site.first.script, OutriderError(Reason.DRAINING, "the first goes", retry_after_s=1.0))
    refuse(site.second.script, OutriderError(Reason.DRAINING, "the second goes", retry_after_s=1.0))
    response = await site.ask(prompt="if x")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["message"] == "the second goes"


async def set_limits(site: Site, which: int, **limits: int) -> None:
    """Give one verifier other limits, and let the gateway poll it."""
    script = (site.first.script, site.second.script)[which]
    script.info = replace(script.info, **limits)
    await site.gateway.router.replicas[which].refresh(script.info.tokenizer_fingerprint)


def script_picks(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the router pick the first replica once, then the second; list the picked addresses."""
    router = site.gateway.router
    picked: list[str] = []

    def pick(model: str | None, prefixes: Sequence[bytes]) -> Any:
        replica = router.replicas[min(len(picked), 1)]
        picked.append(replica.address)
        return Pick(model or "models/target", replica.info, replica)

    monkeypatch.setattr(router, "pick", pick)
    return picked


@pytest.mark.parametrize(
    ("limits", "body"),
    [
        ({"vocab_size": 4000}, {"logit_bias": {"4050": 1}}),
        ({"context_length": 64}, {"max_tokens": 100}),
        ({"context_length": 4}, {"prediction": {"type": "content", "content": "a b c d e f g h"}}),
    ],
)
async def test_a_request_runs_on_the_replica_that_it_was_checked_against(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, int],
    body: dict[str, Any],
) -> None:
    await set_limits(site, 1, **limits)
    picked = script_picks(site, monkeypatch)
    asked = {"prompt": ["if x", "x"], "n": 2} | body
    response = await site.http.post("/v1/completions", json=asked)
    assert (response.status_code, "if x" in response.text) == (200, True), response.text
    assert len(picked) == 1
    assert (len(site.first.script.requests), len(site.second.script.requests)) == (4, 0)


async def test_a_request_that_moves_is_checked_against_the_next_replica(site: Site) -> None:
    await set_limits(site, 1, vocab_size=4000, context_length=64)
    site.first.script.answer = lambda _: [LEAVES]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "if x"}]}
    body["prediction"] = {"type": "content", "content": "x " * 100}
    # The shorter context leaves room for fewer tokens.
    assert (await site.http.post("/v1/chat/completions", json=body)).status_code == 200
    [refused] = site.first.script.requests
    [taken] = site.second.script.requests
    assert refused.max_tokens == 2048 - len(refused.prompt)
    assert taken.max_tokens == 64 - len(taken.prompt)
    assert len(refused.prediction) > len(taken.prediction) == 64
    for wrong, field in (
        ({"banned_token_ids": [4050]}, "banned_token_ids"),
        ({"max_tokens": 99}, "max_tokens"),
    ):
        site.gateway.router.replicas[0].problem = None
        response = await site.http.post("/v1/chat/completions", json=body | wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert "verifier" not in response.json()["error"]["message"]
    assert (len(site.first.script.requests), len(site.second.script.requests)) == (3, 1)


async def test_a_replica_lost_during_tokenising_gets_no_request(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await set_limits(site, 1, context_length=64)
    encode = Prompts.encode

    async def lose_the_first(self: Prompts, *given: Any, **how: Any) -> list[int]:
        gone = OutriderError(Reason.VERIFIER_UNAVAILABLE, "gone")
        site.gateway.router.replicas[0].mark_lost(gone)
        return await encode(self, *given, **how)

    monkeypatch.setattr(Prompts, "encode", lose_the_first)
    response = await site.http.post("/v1/completions", json={"prompt": "if x", "max_tokens": 99})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    assert "maximum context length is 64 tokens" in response.json()["error"]["message"]
    assert (site.first.script.requests, site.second.script.requests) == ([], [])


async def test_simultaneous_requests_are_spread_over_the_replicas(site: Site) -> None:
    n = 3
    for script in (site.first.script, site.second.script):
        script.answer = lambda _: [600.0]
    asked = [
        asyncio.create_task(site.http.post("/v1/completions", json={"prompt": "if x", "n": n}))
        for _ in range(8)
    ]
    try:
        await until(lambda: site.first.script.running + site.second.script.running == 8 * n)
        assert (site.first.script.running, site.second.script.running) == (4 * n, 4 * n)
        counts = [len(replica.sequences) for replica in site.gateway.router.replicas]
        assert counts == [4 * n] * 2
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    await until(
        lambda: [len(replica.sequences) for replica in site.gateway.router.replicas] == [0, 0]
    )
