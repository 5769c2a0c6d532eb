"""The parts of a campaign's stack that a machine or a file leaves out."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from outrider_bench.chaos import parts
from outrider_bench.chaos.faults import FAULTS
from outrider_bench.chaos.redis_pair import RedisPair
from outrider_bench.chaos.spec import Campaign


@pytest.fixture
def _has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with every program and package."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(parts, "find_spec", lambda name: object())


def played(campaign: Campaign) -> set[str]:
    return set(campaign.bag(campaign.absent()))


@pytest.mark.usefixtures("_has_all")
def test_each_fault_is_played_with_some_file() -> None:
    assert played(Campaign()) | played(Campaign(sentinel=True)) == set(FAULTS)


@pytest.mark.usefixtures("_has_all")
def test_redis_is_either_alone_or_a_pair() -> None:
    alone, pair = played(Campaign()), played(Campaign(sentinel=True))
    assert alone - pair == {name for name in FAULTS if is_alone(name)}
    assert pair - alone == {name for name in FAULTS if "fails over" in name}


def is_alone(name: str) -> bool:
    return name.startswith("redis") and "fails over" not in name


def test_a_machine_without_suffix_trees_has_no_suffix_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda name: None)
    assert {"suffix", "link-suffix"} <= parts.absent(sentinel=False)


def test_the_second_redis_follows_the_first_and_a_sentinel_watches(tmp_path: Path) -> None:
    pair = RedisPair({"redis-1": 7001, "redis-2": 7002}, 7003)
    first, second, sentinel = pair.launches(tmp_path)
    assert ("--dbfilename", "redis-2.rdb") in itertools.pairwise(second.arguments)
    assert "--replicaof" not in first.arguments
    assert second.arguments[-3:] == ("--replicaof", "127.0.0.1", "7001")
    assert "sentinel monitor pool 127.0.0.1 7001 1\n" in sentinel.files["sentinel.conf"]
    assert pair.url == "redis+sentinel://127.0.0.1:7003/pool"
