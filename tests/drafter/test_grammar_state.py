"""A drafter follows its guesses through a request's grammar, even when the guesses change."""

from __future__ import annotations

from drafter_svc.grammar_state import GrammarState
from tests.toy_grammars import Ladder


def allowed(state: GrammarState, output: list[int]) -> list[int] | None:
    mask = state.mask(output)
    if mask is None:
        return None
    return [token for token in range(31) if int(mask[0, 0]) >> token & 1]


def test_the_mask_is_that_of_the_present_guesses_after_they_changed() -> None:
    state = GrammarState(Ladder(), 1)
    for output in ([], [1, 3], [1, 2, 4], [2], [2, 4, 5], []):
        last = output[-1] if output else 0
        assert allowed(state, output) == [last + 1, last + 2]


def test_behind_a_forbidden_output_nothing_is_masked_any_more() -> None:
    state = GrammarState(Ladder(), 1)
    assert allowed(state, [1, 5]) is None
    assert allowed(state, [1]) is None


def test_a_grammar_whose_masks_take_long_masks_nothing_any_more() -> None:
    """Each mask takes 30 ms, of which 5 ms are free.

    The time of all masks beyond the free time may add up to 100 ms.
    """
    ticks = iter([0.03 * i for i in range(100)])
    state = GrammarState(Ladder(), 1, lambda: next(ticks))
    masked = [allowed(state, []) is not None for _ in range(8)]
    assert masked == [True] * 5 + [False] * 3


def test_masks_of_a_usual_time_may_be_any_number() -> None:
    ticks = iter([0.004 * i for i in range(1000)])
    state = GrammarState(Ladder(), 1, lambda: next(ticks))
    assert all(allowed(state, []) is not None for _ in range(400))
