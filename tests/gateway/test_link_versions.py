"""A gateway and a verifier use the newest version that both speak, or say that they share none.

During a rolling update either side may be the newer side.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.text.prompts import Prompts
from gateway.upstream import agreement
from outrider.protocol.link_versions import Versions
from tests.gateway.gateway_rig import echo
from tests.gateway.mortal_verifiers import Site, Verifier, running_site
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(loop_scope="session")
async def site(prompts: Prompts) -> AsyncIterator[Site]:
    async with running_site(prompts) as made:
        for verifier in (made.first, made.second):
            verifier.script.answer = echo
        yield made


async def restart(site: Site, verifier: Verifier, versions: Versions | None) -> None:
    """Restart a verifier with these versions; wait until the gateway has asked it for a version."""
    replica = site.gateway.router.replicas[[site.first, site.second].index(verifier)]
    await verifier.kill()
    await until(lambda: "does not answer" in str(replica.problem))
    verifier.script.asked_versions.clear()
    verifier.script.used_versions.clear()
    verifier.script.requests.clear()
    verifier.script.versions = versions
    await verifier.start()
    await until(lambda: "does not answer" not in str(replica.problem))


@pytest.mark.parametrize(
    ("gateway", "verifier", "used"),
    [
        (Versions(1, 2), Versions(2, 3), 2),
        (Versions(2, 3), Versions(1, 2), 2),
        (Versions(1, 3), Versions(1, 3), 3),
        (Versions(1, 1), Versions(1, 2), 1),
        (Versions(1, 2), None, 1),
    ],
)
async def test_a_pair_uses_the_newest_version_that_both_speak(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    gateway: Versions,
    verifier: Versions | None,
    used: int,
) -> None:
    """A verifier that is older than the call AgreeVersion speaks version 1."""
    monkeypatch.setattr(agreement, "SPOKEN", gateway)
    await site.second.kill()
    await restart(site, site.first, verifier)
    assert site.gateway.router.replicas[0].problem is None
    response = await site.ask(prompt="if x")
    assert (response.status_code, set(site.first.script.used_versions)) == (200, {used})


async def test_a_verifier_without_a_common_version_gets_no_request_until_it_is_replaced(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    sentence = (
        "the gateway speaks version 1 of outrider.internal.v1, and the verifier versions 2 to 3;"
        " update the older of the two"
    )
    with caplog.at_level(logging.INFO):
        await restart(site, site.first, Versions(2, 3))
        for _ in range(6):
            assert (await site.ask(prompt="if x")).status_code == 200
        polled = site.gateway.router.replicas[0].answered_at
        await until(lambda: site.gateway.router.replicas[0].answered_at > polled)
    assert (len(site.first.script.requests), len(site.second.script.requests)) == (0, 6)
    state = (await site.http.get("/readyz")).json()
    assert (state["status"], state["verifiers"][0]["ready"]) == ("degraded", False)
    problem = f"verifier {site.first.address} is not ready: {sentence}"
    assert state["verifiers"][0]["problem"] == problem
    # Both logs have the sentence once, although the verifier was polled many times.
    said = [(each.name, each.message) for each in caplog.records if sentence in each.message]
    assert [name for name, _ in said] == [
        "verifier_svc.streams.gateway_streams",
        "gateway.upstream.routing",
    ]
    assert said[1][1] == problem
    await restart(site, site.first, Versions(1, 2))
    assert site.gateway.router.replicas[0].problem is None
    await site.second.kill()
    assert (await site.ask(prompt="if x")).status_code == 200
    assert len(site.first.script.requests) == 1


async def test_a_gateway_that_no_verifier_understands_is_not_ready(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "SPOKEN", Versions(2, 3))
    await restart(site, site.first, Versions(1, 1))
    await restart(site, site.second, None)
    response = await site.http.get("/readyz")
    assert (response.status_code, response.json()["status"]) == (503, "failed")
    for verifier in (site.first, site.second):
        assert (
            f"verifier {verifier.address} is not ready: the gateway speaks versions 2 to 3 of"
            " outrider.internal.v1, and the verifier version 1; update the older of the two"
        ) in response.json()["detail"]
    refused = await site.ask(prompt="if x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert site.first.script.requests == site.second.script.requests == []


async def test_a_verifier_that_was_replaced_between_two_polls_costs_no_request(
    prompts: Prompts,
) -> None:
    async with running_site(prompts, poll_s=60.0) as site:
        for verifier in (site.first, site.second):
            verifier.script.answer = echo
        site.first.script.versions = Versions(2, 2)
        for _ in range(3):
            assert (await site.ask(prompt="if x")).status_code == 200
        assert (len(site.first.script.requests), len(site.second.script.requests)) == (0, 3)
        problem = site.gateway.router.replicas[0].problem
        assert "the verifier version 2" in str(problem)
