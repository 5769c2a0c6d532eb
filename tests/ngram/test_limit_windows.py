"""Gateways with one Redis count the use of each API key together, with the documented rights."""

from __future__ import annotations

import re
import time

import pytest
from redis_servers import OPERATIONS, PASSWORD, Deployment, Standalone, until

from gateway.access.windows import Windows, windows

USER = "outrider-limits"


def grant_rights(deployment: Deployment) -> str:
    """Give the documented user its rights on each server; returns the URL with its name."""
    [line] = re.findall(rf"^user {USER} .*$", OPERATIONS, re.MULTILINE)
    words = [word.replace(">PASSWORD", f">{PASSWORD}") for word in line.split()[1:]]
    deployment.each("ACL", "SETUSER", *words)
    if deployment.kind == "+sentinel":
        rights = ["on", f">{PASSWORD}", "resetchannels", "-@all", "+sentinel|masters"]
        for process in deployment.in_url():
            with process.admin() as client:
                client.execute_command("ACL", "SETUSER", USER, *rights)
    return deployment.url.replace("outrider@", f"{USER}@").partition("?")[0]


def shared(deployment: Deployment, url: str) -> Windows:
    return windows(url, deployment.password_file, deployment.ca)


async def test_two_gateways_count_together(deployment: Deployment) -> None:
    url = grant_rights(deployment)
    one, other = shared(deployment, url), shared(deployment, url)
    minute, _ = one.now()
    assert (await one.add("alice/tokens", 5, minute)).total == 5
    assert (await other.add("alice/tokens", 7, minute)).total == 12
    assert (await other.add("alice/tokens", -4, minute)).total == 8
    assert (await one.add("bob/tokens", 1, minute)).total == 1
    assert (await one.add("alice/tokens", 1, minute + 1)).total == 1
    assert len(deployment.all_keys()) == 3
    for windows_ in (one, other):
        await windows_.close()


async def test_counts_expire(redis_server: Standalone) -> None:
    made = shared(redis_server, grant_rights(redis_server))
    await made.add("alice/tokens", 5, made.now()[0])
    [key] = redis_server.all_keys()
    assert key.startswith(b"outrider:limits:")
    [ttl] = redis_server.each("TTL", key.decode())
    assert 60 < ttl <= 120
    await made.close()


async def test_a_lost_redis_delays_no_request_and_is_used_again(
    redis_server: Standalone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = shared(redis_server, grant_rights(redis_server))
    minute, _ = made.now()
    assert (await made.add("alice/tokens", 5, minute)).total == 5
    redis_server.kill()
    began = time.monotonic()
    assert (await made.add("alice/tokens", 1, minute)).total == 1
    assert (await made.add("alice/tokens", 1, minute)).total == 2
    assert time.monotonic() - began < 1.0
    assert caplog.text.count("limits are counted by this gateway alone") == 1
    redis_server.start()
    until(lambda: redis_server.each("PING") == [True])
    grant_rights(redis_server)
    monkeypatch.setattr(made, "_paused_until", 0.0)
    assert (await made.add("alice/tokens", 9, minute)).total == 9
    await made.close()
