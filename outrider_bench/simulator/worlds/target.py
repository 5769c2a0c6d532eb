"""A target whose logits depend on every token that its paged cache holds for a sequence.

A page that is lost, shared wrongly or overwritten therefore changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.lm.runner import SequenceSlice
from outrider_bench.simulator.events import Events

VOCAB = 32
EOS = VOCAB - 1
_ROWS = 1021
# Hashes of sequences are polynomials modulo a Mersenne prime.
_PRIME = 2**61 - 1
_FACTOR = 0x5DEECE66D5DEECE
_TABLE = 2.0 * torch.randn(_ROWS, VOCAB, generator=torch.Generator().manual_seed(20261125))
_TABLE[:, EOS] -= 1.0
_BLANK = -1


class PagedTarget:
    """Computes logits [R, V] from a hash of all earlier tokens, which it reads from the pages."""

    vocab_size = VOCAB
    eos_token_ids: tuple[int, ...] = (EOS,)

    def __init__(
        self,
        events: Events,
        page_count: int,
        page_size: int,
        step_s: float = 0.0,
        token_s: float = 0.0,
    ) -> None:
        """A forward takes `step_s`, and `token_s` for each token."""
        self.slowness = 1.0
        self.fails_next = False
        self.failed_count = 0
        """The number of sequences in failed forwards whose clients have not been told yet."""
        self.is_warm = True
        """True if reading an empty slot is an error. Trial forwards read empty slots."""
        self.token_counts: list[int] = []
        """The number of tokens of each slice of the last forward."""
        self._events = events
        self._page_size = page_size
        self._cache = [_BLANK] * (page_count * page_size)
        self._step_s = step_s
        self._token_s = token_s

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Write the tokens to their pages; return logits as `LanguageModel.forward` does.

        Raises RuntimeError once after `fails_next` was set.
        """
        self.token_counts = [len(part.token_ids) for part in slices]
        seconds = self._step_s + self._token_s * sum(self.token_counts)
        self._events.spend(self.slowness * seconds)
        if self.fails_next:
            self.fails_next = False
            self.failed_count += len(slices)
            raise RuntimeError("the schedule has this forward fail")
        rows: list[int] = []
        for part in slices:
            rows += self._rows(part)
        return _TABLE[rows]

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots as `LanguageModel.move_tokens` does."""
        tokens = [self._cache[source] for source in sources]
        for token, target in zip(tokens, targets, strict=True):
            self._cache[target] = token

    def _rows(self, part: SequenceSlice) -> list[int]:
        """Write a slice, and find the rows of `_TABLE` for its last `logit_count` tokens."""
        size = self._page_size
        cache = self._cache
        slots = [part.pages[slot // size] * size + slot % size for slot in range(part.end)]
        for slot, token in zip(slots[part.start :], part.token_ids, strict=True):
            cache[slot] = token
        tokens = [cache[slot] for slot in slots]
        if self.is_warm and _BLANK in tokens:
            raise AssertionError("a forward reads a slot that no forward has written")
        found = 0
        wanted = len(tokens) - part.logit_count
        first = part.tree_start
        states: list[int] = []
        for token in tokens[:first]:
            found = (found * _FACTOR + token + 1) % _PRIME
            states.append(found)
        # `by_row` has the state after the chain, then the state after each token of the tree.
        by_row = states[-1:]
        for token, parent in zip(tokens[first:], part.parents, strict=True):
            by_row.append((by_row[parent] * _FACTOR + token + 1) % _PRIME)
        return [state % _ROWS for state in [*states, *by_row[1:]][wanted:]]
