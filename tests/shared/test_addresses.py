"""Names of verifiers stand for their current addresses."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest

from outrider.process.network import addresses
from outrider.process.network.addresses import Addresses, check_address


@pytest.mark.parametrize(
    "entry",
    ["dns:", "dns:name", "dns::5", "dns:name:", "dns:name:0", "dns:name:70000", "dns:///a:5"],
)
def test_a_name_needs_a_port(entry: str) -> None:
    with pytest.raises(ValueError, match=f"must name dns:NAME:PORT, not {entry}"):
        check_address(entry)


def answering(monkeypatch: pytest.MonkeyPatch, *infos: tuple[int, str]) -> None:
    """Let the system's resolver answer with these families and hosts."""

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        return [(family, 1, 6, "", (found, port)) for family, found in infos]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


async def test_a_replica_with_an_address_of_both_kinds_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four, six = socket.AF_INET, socket.AF_INET6
    answering(monkeypatch, (six, "fd00::1"), (four, "10.0.0.2"), (four, "10.0.0.1"))
    assert await addresses.resolve("name", 5) == ["10.0.0.1:5", "10.0.0.2:5"]
    answering(monkeypatch, (six, "fd00::2"), (six, "fd00::1"), (six, "fd00::2"))
    assert await addresses.resolve("name", 5) == ["[fd00::1]:5", "[fd00::2]:5"]


async def test_the_systems_own_resolver_is_asked() -> None:
    listed = Addresses(["unix:/x", "dns:localhost:5", "a:1"])
    assert listed.now == ["unix:/x", "a:1"]
    await listed.refresh()
    assert listed.now in (["unix:/x", "127.0.0.1:5", "a:1"], ["unix:/x", "[::1]:5", "a:1"])


async def test_a_name_that_cannot_be_resolved_keeps_its_last_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    answer: list[str] | OSError = ["b:1", "c:1"]

    async def resolve(*_: object) -> list[str]:
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(addresses, "resolve", resolve)
    failures: list[str] = []
    listed = Addresses(["b:1", "dns:name:1"], failures.append)
    await listed.refresh()
    assert listed.now == ["b:1", "c:1"]
    answer = socket.gaierror(-3, "Temporary failure in name resolution")
    for _ in range(3):
        await listed.refresh()
    assert listed.now == ["b:1", "c:1"]
    assert failures == ["dns:name:1"] * 3
    [problem] = listed.problems.values()
    assert problem == (
        "dns:name:1 cannot be resolved (Temporary failure in name resolution); "
        "its last addresses stay: b:1, c:1"
    )
    answer = ["d:1"]
    await listed.refresh()
    assert (listed.now, listed.problems) == (["b:1", "d:1"], {})
    assert caplog.messages == [problem, "dns:name:1 is resolved again: d:1"]


async def test_an_impossible_name_is_a_failure() -> None:
    name = f"dns:{'a' * 70}:1"
    listed = Addresses([name])
    await listed.refresh()
    assert (list(listed.problems), listed.now) == ([name], [])
