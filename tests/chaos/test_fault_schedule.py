"""The faults of a campaign follow from its seed."""

from __future__ import annotations

import pytest

from outrider_bench.chaos.campaign import Planned, round_of
from outrider_bench.chaos.faults import FAULTS, bag_of
from outrider_bench.chaos.parts import REDIS, touched

WITHOUT_REDIS = frozenset(REDIS)
BAG = bag_of([], frozenset())


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
    assert len(bag_of([], WITHOUT_REDIS)) >= 30
    assert set(BAG) == set(FAULTS)


def test_no_fault_is_played_at_a_part_that_is_absent() -> None:
    absent = frozenset(("suffix", "link-suffix", *REDIS))
    bag = bag_of([], absent)
    assert "drafter killed" in bag
    for number in range(4 * len(bag)):
        assert absent.isdisjoint(one.target for one in round_of(1, number, bag, 1.0, absent))


def test_a_fault_that_does_not_exist_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="no fault 'verifier kiled'; the faults are verifier"):
        bag_of(["verifier kiled"], frozenset())


def test_faults_of_redis_alone_need_redis() -> None:
    with pytest.raises(ValueError, match="the stack lacks: link-redis, redis"):
        bag_of(["redis killed"], WITHOUT_REDIS)
