"""Acceptance counts as fallen only if it is clearly below that of the drafter's first hour."""

from __future__ import annotations

import logging
import random

import pytest

from tests.verifier.fake_model import ScriptedDrafter, exposition, make_engine
from verifier_svc.state.acceptance_watch import AcceptanceWatch


class Traffic:
    """Makes the counts of a drafter whose tokens are accepted with some probability."""

    def __init__(self) -> None:
        self.watch = AcceptanceWatch()
        self.verified = 0
        self.accepted = 0
        self.now = 0.0
        self._draw = random.Random(3)

    def hour(self, rate: float, drafts: int = 10_000) -> list[bool]:
        """Play an hour of drafts of four tokens; return what `fell` became at each change."""
        changes = []
        for _ in range(drafts):
            self.now += 3600 / drafts
            self.verified += 4
            self.accepted += sum(self._draw.random() < rate for _ in range(4))
            if self.watch.look(self.verified, self.accepted, self.now):
                changes.append(self.watch.fell)
        return changes


def test_steady_acceptance_raises_no_alarm() -> None:
    for rate in (0.05, 0.3, 0.7, 0.99):
        traffic = Traffic()
        assert [traffic.hour(rate) for _ in range(6)] == 6 * [[]]
        assert traffic.watch.first_rate == pytest.approx(rate, abs=0.02)


def test_a_fall_is_told_once_and_so_is_the_recovery() -> None:
    traffic = Traffic()
    assert traffic.hour(0.6) == []
    assert traffic.hour(0.4) == [True]
    assert traffic.hour(0.6) == [False]


def test_a_small_fall_is_no_alarm() -> None:
    traffic = Traffic()
    traffic.hour(0.6)
    assert traffic.hour(0.55) == []


def test_the_first_hour_lasts_until_enough_tokens_were_verified() -> None:
    traffic = Traffic()
    traffic.hour(0.6, drafts=100)
    assert traffic.watch.first_rate is None
    traffic.hour(0.6)
    assert traffic.watch.first_rate is not None


def test_a_fall_is_logged_and_exported_by_drafter(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    engine, _ = make_engine(clock=lambda: now[0])
    drafter = ScriptedDrafter(engine)
    for now[0], accepted in ((0.0, 0), (4000.0, 3000), (4001.0, 4000)):
        drafter.handle.verified_count = 5000 if now[0] == 4000.0 else 10_000 * (now[0] > 0)
        drafter.handle.accepted_count = accepted
        with caplog.at_level(logging.WARNING):
            engine.drafting.count_messages()
    assert "20 % of its last tokens were accepted, after 60 % in its first hour" in caplog.text
    labels = 'drafter="scripted",family="scripted",model_name="fake",placement="local"'
    assert f"outrider:acceptance_fell{{{labels}}} 1.0" in exposition(engine)
