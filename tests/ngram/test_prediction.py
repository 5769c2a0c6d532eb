"""Predicted outputs are followed token by token, found again after an edit, and never shared."""

from drafter_svc.families.ngram import NgramFamily
from drafter_svc.pools.memory import MemoryPool, NgramOptions
from drafter_svc.pools.prediction import Prediction
from outrider.protocol.draft_messages import Opened, Window
from tests.family_rig import Rig, opened_sequence

FILE = [10, 11, 12, 13, 10, 11, 14, 15, 10, 11, 16, 17, 18]


def opened(prediction: list[int]) -> Opened:
    return opened_sequence(1, [1, 2, 3], Window(24, 6), 4, prediction=prediction, prompt_length=3)


def test_an_output_that_follows_its_prediction_gets_all_of_it() -> None:
    prediction = Prediction(FILE, 3)
    for n, token in enumerate(FILE):
        assert prediction.continuation(FILE[:n], 1) == [token]


def test_the_place_nearest_to_the_expected_one_is_taken() -> None:
    prediction = Prediction(FILE, 2)
    prediction.continuation(FILE[:8], 1)
    assert prediction.continuation([*FILE[:8], 10, 11], 2) == [16, 17]


def test_behind_an_edit_the_prediction_is_found_again() -> None:
    prediction = Prediction(FILE, 3)
    prediction.continuation(FILE[:6], 1)
    edited = [*FILE[:6], 99, 98]
    assert prediction.continuation(edited, 3) == []
    assert prediction.continuation([*edited, 15, 10], 3) == [11, 16, 17]


async def test_the_family_proposes_the_prediction_within_the_window() -> None:
    rig = Rig(NgramFamily(NgramOptions(max_draft_len=4), 1000))
    rig.open(opened(FILE))
    assert [p.token_ids for p in (await rig.draft()).proposals] == [FILE[:6]]
    rig.commit(1, *FILE[:5])
    assert (await rig.draft()).proposals[0].token_ids == FILE[5:11]


async def test_a_prediction_never_enters_a_shared_pool() -> None:
    shared = MemoryPool(NgramOptions(), 1000)
    rig = Rig(NgramFamily(NgramOptions(), 1000, shared))
    rig.open(opened(FILE))
    assert shared.continuation(FILE[:2], 3) == []
