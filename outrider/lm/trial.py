"""Compares the logits of the served forward with the model's own, for two texts, before serving.

A model may attend in ways that the paged attention does not see: to later tokens, with its own
positions, or through a state beside the cache. Such a model raises no error, but would write
another text. The served forward gets the texts as in service: in chunks, with slices of both texts
in one forward, with a token in a forward of its own, with tokens that are rewound and computed
again, and with the ends of both texts as one tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.lm.layout import SequenceSlice

LONGEST_WINDOW = 256
"""The longest sliding window, in tokens, that the texts exceed.

Longer texts would make the start of a large model slow on a CPU.
"""
FEWEST_TOKENS = 12
"""The minimum number of tokens of a text."""
SPARE_TOKENS = 4
"""The number of extra slots of the first text, which in the trial ends with both branches."""
# The least number of tokens of a text, if the context allows it: more than two pages of the usual
# size hold, and not a multiple of the page size.
_TOKENS = 43
_PAST_WINDOW = 20
# The number of tokens at the end of each text in which the texts differ.
_BRANCH = SPARE_TOKENS
# The maximum number of tokens at the end of a text for which logits are compared. More logits of a
# large vocabulary would take too much memory.
_COMPARED = 48
# Models may set the logits of tokens that must not occur to the lowest number of the dtype.
_NEVER = -1e30


# A difference is the root mean square over the vocabulary, divided by the standard deviation of the
# logits. A median over tokens ignores the few tokens for which rounding chose another expert.
#
# The tolerated median is `_ROUNDING_FACTOR` times the difference between two attentions of
# `transformers`, within bounds. Measured with random weights: in 91 types of models that are served
# rightly, the median was at most twice that difference, and at most 3e-6 in float32 and 0.08 in
# bfloat16. In types that would be served wrongly, it was 0.03 to 1.4 in float32.
_ROUNDING_FACTOR = 5
_LARGEST_MEDIAN = 0.2
# The least tolerated median, and the tolerated root mean square over any number of tokens: for one
# token with another expert, 0.46 was measured.
_EXACT = (1e-3, 0.05)
_ROUNDED = (0.03, 0.6)
# If there are only a few tokens, rounding may choose another expert for most of them: a median of
# 0.12 was measured. So the median of fewer than `_MANY_TOKENS` tokens may be `_SEVERAL_FACTOR`
# times as large, and the median of fewer than `_SEVERAL_TOKENS` tokens is not checked.
_MANY_TOKENS = 12
_SEVERAL_TOKENS = 4
_SEVERAL_FACTOR = 8


@dataclass(frozen=True, slots=True)
class OwnLogits:
    """Logits [2, compared, V] of both texts with a model's own attention.

    `rounding` is the median difference between the model's logits with eager and with sdpa
    attention; infinite if the model has no sdpa.
    """

    logits: torch.Tensor
    rounding: float


@dataclass(frozen=True, slots=True)
class _Piece:
    """A slice of a text, and the text (0 or 1) and position of each token with compared logits."""

    part: SequenceSlice
    rows: list[tuple[int, int]]


class Texts:
    """Two texts of `count` tokens that differ in their last `_BRANCH` tokens, and their pages."""

    def __init__(
        self, vocab_size: int, windows: Sequence[int | None], *, longest: int, page_size: int
    ) -> None:
        """Draw texts of at most `longest` tokens, longer than windows up to `LONGEST_WINDOW`."""
        enough = [_TOKENS, *(w + _PAST_WINDOW for w in windows if w and w <= LONGEST_WINDOW)]
        self.count = min(max(enough), longest)
        self.compared = min(_COMPARED, self.count)
        self._fork = self.count - _BRANCH
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(vocab_size, (self.count + _BRANCH,), generator=draw).tolist()
        # The first tokens of the branches must differ.
        ids[self.count] = (ids[self._fork] + 1) % vocab_size
        self.token_ids = [ids[: self.count], ids[: self._fork] + ids[self.count :]]
        # The first text ends with both branches.
        pages_each = -(-(self.count + _BRANCH) // page_size)
        # In descending order, so that a text's pages do not follow each other in the cache.
        pages = list(range(2 * pages_each))[::-1]
        self.page_count = len(pages)
        """The number of pages that the batches overwrite, from page 0 on."""
        self._pages = [pages[0::2], pages[1::2]]

    def batches(self) -> list[list[_Piece]]:
        """Return the batches in which the served forward computes the texts."""
        middle = self.count // 2 + 1
        fork = self._fork
        return [
            [self._piece(0, 0, middle)],
            [self._piece(0, middle, fork - 2), self._piece(1, 0, middle + 2)],
            [self._piece(0, fork - 2, fork - 1)],
            [self._piece(1, middle + 2, self.count), self._tree()],
            [self._piece(1, fork, self.count)],
        ]

    def own_row(self, position: int) -> int:
        """Return the row of a position among the compared positions."""
        return position - (self.count - self.compared)

    def _piece(self, text: int, start: int, end: int) -> _Piece:
        positions = range(max(start, self.count - self.compared), end)
        ids = self.token_ids[text][start:end]
        part = SequenceSlice(ids, start, self._pages[text], len(positions))
        return _Piece(part, [(text, position) for position in positions])

    def _tree(self) -> _Piece:
        """Return the last token before the fork, with both branches as a tree after it."""
        chain = self._piece(0, self._fork - 1, self.count)
        branch = self._piece(1, self._fork, self.count)
        ids = chain.part.token_ids + branch.part.token_ids
        parents = [*range(_BRANCH), 0, *range(_BRANCH + 1, 2 * _BRANCH)]
        part = SequenceSlice(ids, self._fork - 1, self._pages[0], len(ids), parents)
        return _Piece(part, chain.rows + branch.rows)


@torch.inference_mode()
def compute(model: Any, texts: Texts) -> torch.Tensor:
    """Return the logits [2, compared, V] of a forward with the attention that the model has now."""
    device = next(model.parameters()).device
    ids = torch.tensor(texts.token_ids, device=device)
    output = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        use_cache=False,
        logits_to_keep=texts.compared,
    )
    logits: torch.Tensor = output.logits[:, -texts.compared :]
    return logits


def differences(expected: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the difference between each token's logits [..., V] and the expected logits."""
    expected = expected.float()
    logits = logits.float()
    never = expected < _NEVER
    expected = expected.masked_fill(never, 0)
    logits = logits.masked_fill(never & (logits < _NEVER), 0)
    return (logits - expected).square().mean(-1).sqrt() / expected.std(-1).clamp(min=1e-6)


def disagreement(
    model: Any,
    texts: Texts,
    own: OwnLogits,
    forward: Callable[[list[SequenceSlice]], torch.Tensor],
) -> str | None:
    """Compare the logits of `forward`, the forward to be served, with the model's own logits.

    Return a sentence about the first slice whose logits differ by more than rounding; else None.
    """
    exact = all(parameter.dtype is torch.float32 for parameter in model.parameters())
    least, largest = _EXACT if exact else _ROUNDED
    typical = min(max(least, _ROUNDING_FACTOR * own.rounding), _LARGEST_MEDIAN)
    for batch in texts.batches():
        logits = forward([piece.part for piece in batch])
        if not bool(logits.isfinite().all() & own.logits.isfinite().all()):
            return f"some of its logits are not numbers in {own.logits.dtype}"
        for found in _by_text(texts, batch, own.logits, logits):
            mean = float(found.square().mean().sqrt())
            # This comparison counts a NaN as a difference.
            if not (mean <= largest and float(found.median()) <= _for_count(typical, len(found))):
                return (
                    "with the paged attention its logits differ from those of its own forward by "
                    f"{mean:.2g} standard deviations"
                )
    return None


def _for_count(typical: float, tokens: int) -> float:
    """Return the tolerated median over `tokens` tokens."""
    if tokens >= _MANY_TOKENS:
        return typical
    return typical * _SEVERAL_FACTOR if tokens >= _SEVERAL_TOKENS else math.inf


def _by_text(
    texts: Texts, batch: list[_Piece], own: torch.Tensor, logits: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Yield the differences of each piece's tokens; a tree's two texts come one after the other."""
    at = 0
    for piece in batch:
        for text in (0, 1):
            rows = [texts.own_row(position) for of, position in piece.rows if of == text]
            if rows:
                yield differences(own[text, rows], logits[at : at + len(rows)])
                at += len(rows)
