"""A small target that the tests can enumerate.

The target's distribution depends on the whole text, which it reads from its pages. So another
text's page, or an overwritten page, changes the output.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from outrider.lm.runner import SequenceSlice
from tests.tree_paths import path_to

VOCAB = 5
LENGTH = 3
"""The number of tokens whose joint distribution is compared."""
Probs = npt.NDArray[np.float64]
Text = tuple[int, ...]
NextProbs = Callable[[Text], Probs]
"""The distribution of the token after a text, prompt included."""
NextLogits = Callable[[Text], torch.Tensor]
"""The logits of the token after a text, [V]."""
PROMPTS: tuple[Text, ...] = ((2,), (1, 2, 3, 4, 0, 1), (1, 2, 3, 4, 0, 1, 2, 3, 4, 1, 0))
"""Two of the prompts are longer than a page and begin alike."""


@cache
def target_probs(text: Text) -> Probs:
    """Return a different random distribution after each text."""
    logits = np.random.default_rng(zlib.crc32(bytes(text))).normal(size=VOCAB) * 1.3
    probs: Probs = torch.from_numpy(logits).softmax(-1).numpy()
    return probs


def fixed(*probs: float) -> NextProbs:
    """Return the same distribution after every text."""
    return lambda text: np.array(probs)


def near(target: NextProbs, share: float = 0.6, seed: int = 1) -> NextProbs:
    """Return a mixture of the target's distribution, with weight `share`, and a random one."""

    @cache
    def mixed(text: Text) -> Probs:
        other = np.random.default_rng([seed, zlib.crc32(bytes(text))]).dirichlet(np.ones(VOCAB))
        found: Probs = share * target(text) + (1 - share) * other
        return found

    return mixed


class SmallTarget:
    """A model for the engine. `takes` gets the number of tokens of each forward."""

    eos_token_ids = ()

    def __init__(self, logits: NextLogits, page_count: int, page_size: int) -> None:
        self.vocab_size = len(logits(PROMPTS[0]))
        self._logits = logits
        self._pages = np.full((page_count, page_size), -1, np.int16)
        self.takes: Callable[[int], None] = lambda token_count: None

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        size = self._pages.shape[1]
        rows: list[torch.Tensor] = []
        self.takes(sum(len(part.token_ids) for part in slices))
        for part in slices:
            at = np.arange(part.start, part.end)
            pages = np.array(part.pages)
            self._pages[pages[at // size], at % size] = part.token_ids
            text = tuple(self._pages[pages].flatten()[: part.end].tolist())
            assert min(text) >= 0, "a token of the past is not in its page"
            for slot in range(part.end - part.logit_count, part.end):
                rows.append(self._logits(_text_of(part, text, slot)))
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots as `LanguageModel.move_tokens` does."""
        flat = self._pages.reshape(-1)
        flat[targets] = flat[sources]


def _text_of(part: SequenceSlice, cached: Text, slot: int) -> Text:
    """Return the text that ends with the token of `slot`; in a tree it ends with a path."""
    first = part.tree_start
    path = path_to(slot - first + 1, part.parents)
    if not path:
        return cached[: slot + 1]
    return (*cached[:first], *[cached[first - 1 + row] for row in path])
