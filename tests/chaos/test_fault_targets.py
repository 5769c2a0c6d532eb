"""A campaign plays each fault, and leaves out drafters that its machine cannot run."""

from __future__ import annotations

import shutil

import pytest

from outrider_bench.chaos import parts
from outrider_bench.chaos.faults import FAULTS, bag_of


@pytest.fixture
def _has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has every program and package."""
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(parts, "find_spec", lambda name: object())


@pytest.mark.usefixtures("_has_all")
def test_each_fault_is_played() -> None:
    assert set(bag_of([], parts.absent())) == set(FAULTS)


def test_a_machine_without_suffix_trees_has_no_suffix_drafter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda name: None)
    assert {"suffix", "link-suffix"} <= parts.absent()
