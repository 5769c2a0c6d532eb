"""A text that the client expects, such as the file that is being edited: followed in step, and found again behind an edit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


class Prediction:
    """Guesses from one expected output. Private to its request, and so never part of any pool."""

    def __init__(self, token_ids: list[int], max_matching_ngram_size: int) -> None:
        self._tokens = token_ids
        self._sizes = range(max_matching_ngram_size, 1, -1)
        # Where the output was last found, and how long it was then.
        self._at, self._length = 0, 0
        # By n-gram, the places behind it, in order.
        self._behind: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for end in range(1, len(token_ids) + 1):
            for size in self._sizes:
                if size <= end:
                    self._behind[tuple(token_ids[end - size : end])].append(end)

    def continuation(self, generated: Sequence[int], length: int) -> list[int]:
        """What should follow the output so far; empty when its end is not in the prediction.

        Of several places the one nearest to where it should be by now is taken: an output follows its prediction in order.
        """
        place = self._place(generated)
        if place is None:
            return []
        self._at, self._length = place, len(generated)
        return self._tokens[place : place + length]

    def _place(self, generated: Sequence[int]) -> int | None:
        # Two tokens tell more than one; but of the very first there is no more to go by.
        if not generated:
            return 0
        if len(generated) == 1:
            return 1 if self._tokens[:1] == [*generated] else None
        for size in self._sizes:
            places = self._behind.get(tuple(generated[-size:])) if size <= len(generated) else None
            if places:
                due = self._at + len(generated) - self._length
                return min(places, key=lambda place: abs(place - due))
        return None
