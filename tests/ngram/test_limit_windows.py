"""Gateways with one Redis count the use of each API key together, with the documented rights."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

import pytest
from redis_servers import (
    OPERATIONS,
    PASSWORD,
    Certificates,
    Cluster,
    Deployment,
    Standalone,
)
from waiting import wait_until

from gateway.access.rate_windows import Count
from gateway.access.redis_rate_windows import RedisRateWindows

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
    return deployment.url.replace("outrider@", f"{USER}@")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared(deployment: Deployment, url: str) -> RedisRateWindows:
    return RedisRateWindows.of(url, deployment.password_file, None)


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


async def test_a_new_password_needs_no_restart(deployment: Deployment) -> None:
    """The old password is refused from then on, and connections that are lost are made again."""
    url = grant_rights(deployment)
    made = shared(deployment, url)
    minute, _ = made.now()
    assert await made.add("alice/tokens", 5, minute) == Count(5, is_shared=True)
    for command in (
        ("ACL", "SETUSER", USER, "resetpass", ">renewed"),
        ("CLIENT", "KILL", "USER", USER),
    ):
        deployment.each(*command)
        if deployment.kind == "+sentinel":
            for process in deployment.in_url():
                with process.admin() as client:
                    client.execute_command(*command)
    deployment.password_file.write_text("renewed\n")
    deadline = time.monotonic() + 20
    # The first command meets the closed connection, and then Redis is left alone for a while.
    while not (await made.add("alice/tokens", 1, minute)).is_shared:
        assert time.monotonic() < deadline
        made._paused_until = 0.0
    await made.close()
    # Other tests share the deployment, and log in with its password.
    deployment.password_file.write_text(PASSWORD + "\n")


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
    assert time.monotonic() - began < 5.0
    assert caplog.text.count("limits are counted by this gateway alone") == 1
    redis_server.start()
    wait_until(lambda: redis_server.each("PING") == [True])
    grant_rights(redis_server)
    monkeypatch.setattr(made, "_paused_until", 0.0)
    assert (await made.add("alice/tokens", 9, minute)).total == 9
    await made.close()


async def test_a_burst_is_counted_in_redis_and_expires(redis_server: Standalone) -> None:
    made = shared(redis_server, grant_rights(redis_server))
    minute, _ = made.now()
    counts = await asyncio.gather(*(made.add("alice/requests", 1, minute) for _ in range(300)))
    assert all(count.is_shared for count in counts)
    assert {count.total for count in counts} == set(range(1, 301))
    [key] = redis_server.all_keys()
    assert key.startswith(b"outrider:limits:")
    [ttl] = redis_server.each("TTL", key.decode())
    assert 60 < ttl <= 120
    await made.close()


async def test_a_frozen_redis_does_not_fail_the_end(
    tmp_path: Path, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = Standalone(tmp_path, certificates)
    try:
        made = shared(deployment, grant_rights(deployment))
        assert (await made.add("alice/tokens", 5, made.now()[0])).is_shared
        deployment.data[0].freeze()
        await made.close()
    finally:
        deployment.close()
    assert caplog.text.count("a connection to Redis did not close properly") == 1


@pytest.mark.slow
async def test_a_frozen_node_of_a_cluster_delays_no_request_and_leaves_no_connection(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_files()
    made = shared(cluster, grant_rights(cluster))
    minute, _ = made.now()
    assert (await made.add("alice/tokens", 5, minute)).is_shared
    cluster.data[2].freeze()
    shares = []
    for number in range(12):
        monkeypatch.setattr(made, "_paused_until", 0.0)
        began = time.monotonic()
        shares.append((await made.add(f"{number}", 5, minute)).is_shared)
        assert time.monotonic() - began < 1.0
    assert set(shares) == {True, False}
    await made.close()
    assert open_files() == files
