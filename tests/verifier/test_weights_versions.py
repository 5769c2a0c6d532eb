"""Accepted tokens are counted by the version of a drafter's weights, and versions are compared."""

from __future__ import annotations

import logging

import pytest

from tests.verifier.fake_model import ScriptedDrafter, exposition, make_engine
from verifier_svc.engine.loop import Engine

FELL = 'acceptance_fell{drafter="scripted",family="scripted",model_name="fake",placement="local"}'


def counts(engine: Engine) -> dict[str, tuple[float, float]]:
    """Return the numbers of verified and of accepted tokens, keyed by version."""
    engine._metrics.flush()
    found: dict[str, list[float]] = {"draft": [], "accepted": []}
    versions: list[str] = []
    for line in exposition(engine).splitlines():
        for kind, numbers in found.items():
            name = f"outrider:spec_decode_num_{kind}_tokens_by_weights_total{{"
            if line.startswith(name):
                numbers.append(float(line.split()[-1]))
                version = line.partition('weights_version="')[2].partition('"')[0]
                versions += [version] * (kind == "draft")
    return dict(zip(versions, zip(found["draft"], found["accepted"], strict=True), strict=True))


def drafted(engine: Engine, version: str, verified: int = 0, accepted: int = 0) -> ScriptedDrafter:
    """Let a drafter with these weights and counts join; its metrics count 10 tokens, 4 accepted."""
    drafter = ScriptedDrafter(engine, weights_version=version)
    drafter.handle.verified_count, drafter.handle.accepted_count = verified, accepted
    engine._metrics.verified(drafter.handle, 10, 4, 5)
    return drafter


def test_tokens_are_counted_for_the_last_two_versions_of_a_drafter() -> None:
    engine, _ = make_engine()
    engine.drafting.leave(drafted(engine, "one").handle)
    engine.drafting.leave(drafted(engine, "two").handle)
    assert counts(engine) == {"one": (10, 4), "two": (10, 4)}
    engine.drafting.leave(drafted(engine, "one").handle)
    assert counts(engine) == {"one": (20, 8), "two": (10, 4)}
    engine.drafting.leave(drafted(engine, "three").handle)
    assert counts(engine) == {"one": (20, 8), "three": (10, 4)}


def test_versions_of_a_drafter_that_always_comes_with_another_take_two_places() -> None:
    engine, _ = make_engine()
    for number in range(100):
        engine.drafting.leave(drafted(engine, f"version {number}").handle)
    assert [*counts(engine)] == ["version 98", "version 99"]


def test_a_drafter_without_weights_has_no_version() -> None:
    engine, _ = make_engine()
    drafted(engine, "")
    assert counts(engine) == {}


def test_worse_weights_raise_the_alarm_and_the_earlier_weights_end_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    engine, _ = make_engine(clock=lambda: now[0])
    good = drafted(engine, "good", 10_000, 6_000)
    engine.drafting.leave(good.handle)
    bad = drafted(engine, "bad")
    engine.drafting.count_messages()
    assert f"outrider:{FELL} 0.0" in exposition(engine)
    bad.handle.verified_count, bad.handle.accepted_count = 3_000, 900
    with caplog.at_level(logging.WARNING):
        engine.drafting.count_messages()
    sentence = "30 % of its last tokens were accepted, after 60 % with its earlier weights"
    assert sentence in caplog.text
    assert f"outrider:{FELL} 1.0" in exposition(engine)
    engine.drafting.leave(bad.handle)
    drafted(engine, "good")
    assert f"outrider:{FELL} 0.0" in exposition(engine)


def test_weights_that_drafted_little_are_not_compared_with() -> None:
    engine, _ = make_engine()
    for version, verified, accepted in (("good", 10_000, 6_000), ("short", 50, 50), ("bad", 0, 0)):
        drafter = drafted(engine, version, verified, accepted)
        engine.drafting.leave(drafter.handle)
    watch = drafter.handle.acceptance_watch
    assert watch.first_rate == 0.6
    assert watch.look(3_000, 900, 0.0)


def test_the_same_weights_on_a_new_stream_are_compared_as_before() -> None:
    """A lost connection must neither end an alarm nor make bad weights the basis of comparison."""
    engine, _ = make_engine()
    first = drafted(engine, "same", 10_000, 6_000).handle
    first.acceptance_watch.first_rate, first.acceptance_watch.fell = 0.9, True
    engine.drafting.leave(first)
    again = drafted(engine, "same").handle.acceptance_watch
    assert (again.first_rate, again.fell) == (0.9, True)
