"""The faults of a campaign follow from its seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider_bench.chaos.campaign import Planned, round_of
from outrider_bench.chaos.faults import FAULTS
from outrider_bench.chaos.parts import REDIS, touched
from outrider_bench.chaos.spec import Campaign, load

WITHOUT_REDIS = frozenset(REDIS)
BAG = Campaign().bag(frozenset())


def rounds(seed: int, bag: list[str], overlap: float = 0.3) -> list[list[Planned]]:
    return [round_of(seed, number, bag, overlap) for number in range(2 * len(bag))]


def test_the_same_seed_gives_the_same_schedule_and_another_one_does_not() -> None:
    assert rounds(7, BAG) == rounds(7, BAG)
    assert rounds(7, BAG) != rounds(8, BAG)


def test_a_round_does_not_depend_on_the_rounds_before_it() -> None:
    assert round_of(7, 100, BAG, 0.3) == rounds(7, BAG)[100]


def test_each_turn_has_every_fault_once() -> None:
    faults = [planned[0].fault for planned in rounds(1, BAG)]
    for turn in (faults[: len(BAG)], faults[len(BAG) :]):
        assert sorted(turn) == sorted(BAG)


def test_two_faults_of_a_round_touch_different_processes() -> None:
    pairs = [planned for planned in rounds(3, BAG, overlap=1.0) if len(planned) == 2]
    assert len(pairs) > len(BAG)
    assert all(touched(one.target).isdisjoint(touched(two.target)) for one, two in pairs)


def test_there_are_thirty_kinds_of_faults_even_without_redis() -> None:
    assert len(Campaign().bag(WITHOUT_REDIS)) >= 30
    assert set(BAG) == set(FAULTS)


def test_no_fault_is_played_at_a_part_that_is_absent() -> None:
    absent = frozenset(("suffix", "link-suffix", *REDIS))
    bag = Campaign().bag(absent)
    assert "drafter killed" in bag
    for number in range(4 * len(bag)):
        assert absent.isdisjoint(one.target for one in round_of(1, number, bag, 1.0, absent))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kinds: [verifier kiled]", "there is no fault 'verifier kiled'; the faults are verifier"),
        ("minutes: 0", "minutes: Input should be greater than 0"),
        ("hours: 1", "hours: there is no such field"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "campaign.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        load(path)


def test_faults_of_redis_alone_need_redis() -> None:
    with pytest.raises(ValueError, match="the stack lacks: link-redis, redis"):
        Campaign(kinds=["redis killed"]).bag(WITHOUT_REDIS)
