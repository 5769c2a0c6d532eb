"""Drafts from a request's prediction: a text that the client expects, such as an edited file."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence


class Prediction:
    """Guesses a request's output from its prediction, and finds the place to go on after an edit.

    The prediction is private to its request and never part of a pool.
    """

    def __init__(self, token_ids: list[int], max_matching_ngram_size: int) -> None:
        self._tokens = token_ids
        self._sizes = range(max_matching_ngram_size, 1, -1)
        # The last place that was found in the prediction, and the output's length at that time.
        self._last_place = 0
        self._last_length = 0
        # The places after each n-gram, in order.
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for end in range(1, len(token_ids) + 1):
            for size in self._sizes:
                if size <= end:
                    self._places[tuple(token_ids[end - size : end])].append(end)

    def continuation(self, generated: Sequence[int], length: int) -> list[int]:
        """Return at most `length` tokens that should follow the output so far.

        The result is empty if the output's last tokens are not in the prediction. If they are in
        several places, the place nearest to the expected place counts, since the output follows its
        prediction in order.
        """
        place = self._find(generated)
        if place is None:
            return []
        self._last_place = place
        self._last_length = len(generated)
        return self._tokens[place : place + length]

    def _find(self, generated: Sequence[int]) -> int | None:
        if not generated:
            return 0
        # One token is too little to find a place, except at the start.
        if len(generated) == 1:
            return 1 if self._tokens[:1] == [*generated] else None
        expected = self._last_place + len(generated) - self._last_length
        for size in self._sizes:
            if size > len(generated):
                continue
            places = self._places.get(tuple(generated[-size:]))
            if places:
                # A repetitive text may have the same n-gram in all its places.
                i = bisect_left(places, expected)
                return min(places[max(0, i - 1) : i + 1], key=lambda place: abs(place - expected))
        return None
