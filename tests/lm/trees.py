"""Random batches with trees, and the chains that give the same logits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies
from hypothesis.strategies import DrawFn

from outrider.lm.layout import SequenceSlice
from outrider.lm.runner import ModelRunner
from outrider.protocol.token_tree import children
from tests.lm.tiny_models import VOCAB_SIZE
from tests.tree_paths import path_to


@dataclass(frozen=True)
class Part:
    """A slice: `before` tokens are in the cache; `text` tokens come before the tree's tokens."""

    before: int
    text: int
    parents: list[int]


@strategies.composite
def parents(draw: DrawFn, most: int = 64) -> list[int]:
    """Return the parents of 1 to `most` draft tokens, in trees of any shape from chain to star."""
    count = draw(strategies.integers(1, most))
    straight = draw(strategies.sampled_from([0.0, 0.5, 0.9]))
    chance = random.Random(draw(strategies.integers(0, 2**32)))
    return [i if chance.random() < straight else chance.randint(0, i) for i in range(count)]


def trees() -> strategies.SearchStrategy[Part]:
    """Return slices with trees, including slices that start at the tree's root."""
    return strategies.builds(
        Part, strategies.integers(1, 150), strategies.integers(0, 3), parents()
    )


def batches() -> strategies.SearchStrategy[list[Part]]:
    """Return batches of prompts, chains and trees, in any mixture."""
    prompts = strategies.builds(
        Part, strategies.integers(0, 20), strategies.integers(1, 70), strategies.just([])
    )
    chains = strategies.builds(
        Part, strategies.integers(0, 60), strategies.integers(1, 9), strategies.just([])
    )
    return strategies.lists(trees() | prompts | chains, min_size=1, max_size=4)


class Sequences:
    """Parts with random tokens and scattered pages of a runner's cache."""

    def __init__(self, runner: ModelRunner, parts: Sequence[Part], seed: int) -> None:
        self.runner = runner
        self.parts = parts
        self.chance = random.Random(seed)
        self._free = self.chance.sample(range(runner.page_count), runner.page_count)
        lengths = [part.before + part.text + len(part.parents) for part in parts]
        self.tokens = [self.chance.choices(range(3, VOCAB_SIZE), k=length) for length in lengths]
        # Room for one more token.
        self.pages = [self._take_pages(length + 1) for length in lengths]

    def _take_pages(self, length: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-length // self.runner.page_size))]

    def slots(self, index: int) -> list[int]:
        """Return the sequence's slots of the flattened cache."""
        size = self.runner.page_size
        return [page * size + i for page in self.pages[index] for i in range(size)]

    def forward(self) -> list[torch.Tensor]:
        """Compute the tokens before the batch, then the batch; return each part's logits."""
        held = list(zip(self.parts, self.tokens, self.pages, strict=True))
        before = [
            SequenceSlice(tokens[: part.before], 0, pages, 0)
            for part, tokens, pages in held
            if part.before
        ]
        if before:
            self.runner.forward(before)
        slices = [
            SequenceSlice(
                tokens[part.before :], part.before, pages, len(tokens) - part.before, part.parents
            )
            for part, tokens, pages in held
        ]
        counts = [part.logit_count for part in slices]
        return list(self.runner.forward(slices).clone().split(counts))

    def path_tokens(self, index: int, row: int) -> list[int]:
        """Return the sequence's tokens up to a row of its tree."""
        part = self.parts[index]
        tokens = self.tokens[index]
        root = part.before + part.text - 1
        path = path_to(row, part.parents)
        return tokens[: root + 1] + [tokens[root + on_path] for on_path in path]

    def prefill(self, tokens: list[int], logit_count: int) -> tuple[torch.Tensor, list[int]]:
        """Compute a chain of tokens in unused pages; return its last logits and its pages."""
        pages = self._take_pages(len(tokens) + 1)
        logits = self.runner.forward([SequenceSlice(tokens, 0, pages, logit_count)])
        return logits.clone(), pages

    def rows_of_chains(self, index: int, most: int) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Compute the paths to up to `most` leaves as chains.

        For each path, yield the numbers of the part's logit rows on it, and the chain's logits,
        which these rows must equal.
        """
        part = self.parts[index]
        leaves = [row for row, below in enumerate(children(part.parents)) if not below]
        for leaf in self.chance.sample(leaves, min(most, len(leaves))):
            path = path_to(leaf, part.parents)
            count = part.text + len(path)
            expected, pages = self.prefill(self.path_tokens(index, leaf), count)
            self._free += pages
            yield [*range(part.text), *[part.text + row - 1 for row in path]], expected


def cached(runner: ModelRunner, slots: Sequence[int]) -> list[torch.Tensor]:
    """Return the keys and values of some slots in each layer."""
    return [array[list(slots)] for layer in runner._layers.values() for array in layer.arrays]


def near(found: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    """Check that numbers are equal up to a share of their root mean square."""
    tolerance = relative * float(expected.float().square().mean().sqrt())
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
