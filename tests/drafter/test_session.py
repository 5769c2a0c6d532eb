"""A drafter's session: which sequences it gets guesses for, what it sends, and its failures."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from drafter_svc.families.base import Family
from outrider.drafter.draft_sequence import DraftSequence
from outrider.drafter.session import DraftSession
from outrider.drafter.strategy import FeatureRows
from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import (
    Closed,
    DraftBatch,
    FeatureRequest,
    Features,
    Opened,
    Proposal,
    Skip,
    StepBatch,
    Verdict,
    Welcome,
    Window,
)
from tests.family_rig import opened_sequence

WINDOW = Window(16, 4)


def opened(sequence_id: int = 1, *tokens: int) -> Opened:
    return opened_sequence(sequence_id, tokens or (10, 11), WINDOW, 2)


def verdict(sequence_id: int, length: int, *new: int) -> Verdict:
    return Verdict(sequence_id, length, list(new), 0, 2)


class Counting(Family):
    """Guesses that each token is one more than the token before it.

    It guesses nothing for sequences in `ends`.
    """

    name = "counting"

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.calls: list[tuple[str, int]] = []
        self.ends: set[int] = set()
        self.postpones: set[int] = set()

    def opened(self, sequence: DraftSequence) -> None:
        self.calls.append(("opened", sequence.id))

    def committed(self, sequence: DraftSequence, num_valid_tokens: int) -> None:
        self.calls.append(("committed", num_valid_tokens))

    def closed(self, sequence: DraftSequence) -> None:
        self.calls.append(("closed", sequence.id))

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        self.asked.append([sequence.id for sequence in sequences])
        for sequence in sequences:
            if sequence.id in self.postpones:
                self.postpones.discard(sequence.id)
                sequence.postpone()
            elif sequence.id not in self.ends:
                last = [*sequence.tokens, *sequence.guesses][-1]
                sequence.extend(range(last + 1, last + 1 + sequence.num_wanted))


def session(family: Family | None = None) -> DraftSession:
    return DraftSession(family or Counting(), lambda: 0.0)


def run(made: DraftSession, interrupted: bool = False) -> DraftBatch:
    """Return the messages of one round, which must not wait for anything."""
    return finish(made.round(lambda: interrupted))


def finish(work: Coroutine[Any, Any, DraftBatch]) -> DraftBatch:
    with pytest.raises(StopIteration) as ended:
        work.send(None)
    batch: DraftBatch = ended.value.value
    return batch


def test_it_drafts_the_next_step_then_ahead_then_nothing() -> None:
    made = session()
    made.apply(StepBatch(opened=[opened()]))
    assert run(made) == DraftBatch([Proposal(1, 2, [12, 13])])
    assert run(made) == DraftBatch([Proposal(1, 2, [12, 13, 14, 15])])
    assert run(made) == DraftBatch()
    made.apply(StepBatch(verdicts=[verdict(1, 3, 12)]))
    assert run(made) == DraftBatch([Proposal(1, 3, [13, 14, 15, 16])])


def test_no_sequence_runs_ahead_while_another_is_urgent() -> None:
    family = Counting()
    made = session(family)
    made.apply(StepBatch(opened=[opened(1)]))
    run(made)
    made.apply(StepBatch(opened=[opened(2)]))
    assert [proposal.sequence_id for proposal in run(made).proposals] == [2]
    assert [proposal.sequence_id for proposal in run(made).proposals] == [1, 2]


def test_a_sequence_without_guesses_is_skipped_once_a_verdict() -> None:
    family = Counting()
    family.ends = {1}
    made = session(family)
    made.apply(StepBatch(opened=[opened(1), opened(2)]))
    assert run(made) == DraftBatch([Proposal(2, 2, [12, 13])], [Skip(1, 2)])
    run(made)
    assert run(made) == DraftBatch()
    made.apply(StepBatch(verdicts=[verdict(1, 3, 7)]))
    assert run(made) == DraftBatch(skips=[Skip(1, 3)])
    made.apply(StepBatch(verdicts=[verdict(1, 3, 7)]))
    assert run(made) == DraftBatch()


def test_a_postponed_sequence_is_asked_for_again_and_not_skipped() -> None:
    family = Counting()
    family.postpones = {1}
    made = session(family)
    made.apply(StepBatch(opened=[opened()]))
    assert run(made) == DraftBatch([Proposal(1, 2, [12, 13])])
    assert family.asked == [[1], [1]]
    family.postpones = {2}
    made.apply(StepBatch(opened=[opened(2)]))
    assert run(made, interrupted=True) == DraftBatch()
    assert run(made) == DraftBatch([Proposal(2, 2, [12, 13])])


def test_branches_are_asked_for_when_the_chain_cannot_grow() -> None:
    class Branching(Counting):
        async def propose(
            self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
        ) -> None:
            for sequence in sequences:
                if sequence.remaining_window > 0:
                    sequence.extend([5, 6, 7][len(sequence.guesses) :])
                else:
                    sequence.branch(1, [9])
                    sequence.give_up_branches()

    made = session(Branching())
    made.apply(StepBatch(opened=[opened()]))
    assert run(made) == DraftBatch([Proposal(1, 2, [5, 6, 7])])
    assert run(made) == DraftBatch([Proposal(1, 2, [5, 6, 7, 9], [0, 1, 2, 1])])
    assert run(made) == DraftBatch()
    made.apply(StepBatch(verdicts=[verdict(1, 4, 5, 9)]))
    assert run(made) == DraftBatch([Proposal(1, 4, [5, 6, 7])])


def test_late_and_repeated_messages_are_ignored() -> None:
    family = Counting()
    made = session(family)
    made.apply(StepBatch(verdicts=[verdict(7, 3, 12)], closed=[Closed(7)]))
    made.apply(StepBatch(opened=[opened()]))
    run(made)
    made.apply(
        StepBatch(
            opened=[opened(1, 5, 6)],
            verdicts=[verdict(1, 3, 12), verdict(1, 3, 12), verdict(1, 2, 11)],
        )
    )
    made.apply(StepBatch(verdicts=[verdict(1, 4, 11, 12, 13)], closed=[Closed(1), Closed(1)]))
    assert family.calls == [("opened", 1), ("committed", 4), ("committed", 4), ("closed", 1)]
    assert run(made) == DraftBatch()
    assert not made.sequences


def test_a_proposal_has_its_rounds_duration_by_the_clock() -> None:
    now = [100.0]

    class Slow(Counting):
        async def propose(
            self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
        ) -> None:
            now[0] += 0.25
            await super().propose(sequences, interrupted)

    made = DraftSession(Slow(), lambda: now[0])
    made.apply(StepBatch(opened=[opened(1), opened(2)]))
    assert [proposal.draft_seconds for proposal in run(made).proposals] == [0.25, 0.25]


class Breaking(Counting):
    """Raises an error in the method `place` for sequences with even ids."""

    def __init__(self, place: str, error: type[Exception] = ZeroDivisionError) -> None:
        super().__init__()
        self.place = place
        self.error = error

    def _fail_at(self, place: str, sequence: DraftSequence) -> None:
        if self.place == place and sequence.id % 2 == 0:
            raise self.error("planted")

    def opened(self, sequence: DraftSequence) -> None:
        self._fail_at("opened", sequence)

    def committed(self, sequence: DraftSequence, num_valid_tokens: int) -> None:
        self._fail_at("committed", sequence)

    def closed(self, sequence: DraftSequence) -> None:
        super().closed(sequence)
        self._fail_at("closed", sequence)

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        await super().propose(sequences, interrupted)
        for sequence in sequences:
            self._fail_at("propose", sequence)


@pytest.mark.parametrize("place", ["opened", "committed", "closed", "propose"])
def test_a_failing_sequence_is_skipped_and_the_others_drafted(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    family = Breaking(place)
    made = session(family)
    made.apply(StepBatch(opened=[opened(1), opened(2), opened(3)]))
    first = run(made)
    fails_at_once = place in ("opened", "propose")
    drafted = [proposal.sequence_id for proposal in first.proposals]
    assert drafted == ([1, 3] if fails_at_once else [1, 2, 3])
    assert first.skips == [Skip(2, 2)] * fails_at_once
    made.apply(StepBatch(verdicts=[verdict(1, 3, 9), verdict(2, 3, 9)]))
    second = run(made)
    assert Proposal(1, 3, [10, 11]) in second.proposals
    assert second.skips == [Skip(2, 3)] * (place != "closed")
    made.apply(StepBatch(closed=[Closed(2)]))
    assert 2 not in made.sequences
    assert family.calls.count(("closed", 2)) == 1
    assert made.abandoned_count == int(place != "closed")
    assert "Traceback" in caplog.text


def test_partial_guesses_of_a_failing_sequence_are_not_proposed() -> None:
    family = Breaking("")
    made = session(family)
    made.apply(StepBatch(opened=[opened(2)]))
    assert run(made) == DraftBatch([Proposal(2, 2, [12, 13])])
    family.place = "propose"
    assert run(made) == DraftBatch()
    assert made.sequences[2].abandoned
    made.apply(StepBatch(verdicts=[verdict(2, 3, 12)]))
    assert run(made) == DraftBatch(skips=[Skip(2, 3)])
    assert made.sequences[2].guesses == [13]


@pytest.mark.parametrize("place", ["opened", "committed", "propose"])
@pytest.mark.parametrize("kind", ["fatal", "outrider"])
def test_errors_that_are_no_sequences_fault_are_raised(place: str, kind: str) -> None:
    class Refusing(OutriderError):
        def __init__(self, message: str) -> None:
            super().__init__(Reason.INTERNAL, message)

    family = Breaking(place, Refusing if kind == "outrider" else ZeroDivisionError)
    family.fatal = (ZeroDivisionError,)
    made = session(family)

    def work() -> None:
        made.apply(StepBatch(opened=[opened(2)]))
        run(made)
        made.apply(StepBatch(verdicts=[verdict(2, 3, 9)]))

    with pytest.raises(family.error):
        work()
    assert made.abandoned_count == 0


class Reading(Counting):
    """Notes the features that it reads."""

    feature_request = FeatureRequest((1,))

    def welcomed(self, welcome: Welcome) -> None:
        if not welcome.feature_width:
            raise OutriderError(Reason.INVALID_VALUE, "the verifier sends no features")

    def features(self, sequence: DraftSequence, first_position: int, rows: FeatureRows) -> None:
        assert isinstance(rows, bytes)
        self.calls.append((f"features {rows.hex()}", first_position))


def test_a_strategy_reads_features_before_the_verdict_of_their_tokens() -> None:
    family = Reading()
    made = session(family)
    made.welcome(Welcome("m", 100, 100, feature_width=2))
    made.apply(StepBatch(opened=[opened()], features=[Features(1, 0, b"abcd")]))
    made.apply(StepBatch(features=[Features(1, 1, b"efghijkl")], verdicts=[verdict(1, 3, 12)]))
    assert family.calls == [
        ("opened", 1),
        ("features 61626364", 0),
        ("features 65666768696a6b6c", 1),
        ("committed", 2),
    ]
    made.apply(StepBatch(features=[Features(7, 0, b"abcd")]))
    assert len(family.calls) == 4


def test_features_of_a_wrong_size_break_the_protocol() -> None:
    made = session(Reading())
    made.welcome(Welcome("m", 100, 100, feature_width=2))
    with pytest.raises(OutriderError, match="features of 5 bytes came") as refused:
        made.apply(StepBatch(opened=[opened()], features=[Features(1, 0, b"abcde")]))
    assert refused.value.reason is Reason.PROTOCOL_VIOLATION
    with pytest.raises(OutriderError, match="features of 4 bytes came"):
        session().apply(StepBatch(opened=[opened()], features=[Features(1, 0, b"abcd")]))


def test_a_strategy_that_needs_features_refuses_a_verifier_without_them() -> None:
    with pytest.raises(OutriderError, match="the verifier sends no features"):
        session(Reading()).welcome(Welcome("m", 100, 100))
