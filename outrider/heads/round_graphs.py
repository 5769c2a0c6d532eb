"""Runs, as CUDA graphs, the rounds of a head that drafts step by step.

Each batch size has two graphs for chains, and two for trees if a place has enough guesses. One
graph makes the first guesses from the states of the committed tokens. The other makes a further
level of guesses, and leaves its results where the next level reads them. So a round is one copy, a
graph for each level and one wait. Each further level continues from W rows of a sequence: the
chain's guess, and in trees also the likeliest other guesses, as
`outrider.heads.kinds.dynamic_tree` chooses them. A level reads only its new rows; it sees earlier
rows and the committed tokens in the pages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from outrider.heads.kinds.dynamic_tree import WIDTH, Tree
from outrider.heads.model import Branch, HeadProposal, HeadSequence, Picker
from outrider.lm.gpu import graphs
from outrider.lm.gpu.inputs import BlockTable, Bucket, Inputs
from outrider.lm.layout import SequenceSlice
from outrider.protocol.token_tree import MAX_TREE_TOKENS
from outrider.sampling.tensors import fetch

if TYPE_CHECKING:
    from outrider.heads.kinds.autoregressive import AutoregressiveModel

log = logging.getLogger(__name__)

_BATCHES = (1, 2, 4, 8, 16, 32)
# The maximum number of levels after the first: with one more, a tree would have too many rows.
_LEVELS = MAX_TREE_TOKENS // WIDTH


class RoundGraphs:
    """Captured rounds of one head. Not thread-safe."""

    def __init__(self, model: AutoregressiveModel, width: int) -> None:
        """Capture chains, and trees of `width` guesses a place.

        Sizes for which memory does not suffice get no graph. A head that cannot be captured gets no
        graphs. Raises torch.AcceleratorError if the device failed.
        """
        assert model.cache is not None
        self._sizes: dict[tuple[int, int], _Size] = {}
        table = BlockTable(_BATCHES[-1], model.cache.shape, model.device)
        capture = graphs.new_capture()
        widths = [1, min(width, model.spec.draft_vocab_size)]
        try:
            for batch in reversed(_BATCHES):
                for choices in widths:
                    if choices == 1 or choices >= WIDTH:
                        self._capture(model, table, (batch, choices), capture)
        except torch.AcceleratorError:
            raise  # this process cannot use the device again
        except RuntimeError as cause:
            log.warning("captured only %d CUDA graphs of the head: %s", self.count, cause)
        else:
            log.info("captured %d CUDA graphs of the head", self.count)

    def _capture(
        self,
        model: AutoregressiveModel,
        table: BlockTable,
        key: tuple[int, int],
        capture: graphs.CaptureGraph,
    ) -> None:
        """Capture the size `key`; log a warning instead if memory does not suffice."""
        try:
            size = _Size(model, table, *key)
            size.capture(capture)
        except torch.OutOfMemoryError as cause:
            log.warning("no CUDA graphs of the head for %d sequences: %s", key[0], cause)
        else:
            self._sizes[key] = size

    @property
    def count(self) -> int:
        """The number of captured graphs."""
        return 2 * len(self._sizes)

    def propose(
        self, sequences: Sequence[HeadSequence], count: int, width: int
    ) -> HeadProposal | None:
        """Guess as `AutoregressiveModel.guess` does, with one wait; None where no graph fits."""
        if count - 1 > _LEVELS:
            return None
        fitting = (size for size in _BATCHES if size >= len(sequences))
        size = self._sizes.get((next(fitting, 0), width))
        return None if size is None else size.propose(sequences, count)


@dataclass(slots=True)
class _Chosen:
    """The rows that the next level reads, as tensors: W rows of each of B sequences.

    CUDA graphs need these tensors at fixed addresses.

    `states` [B, W, C] are the states of the rows' parents. `products` [B, W], float64, are the
    products of the probabilities along the rows' paths. `words` [B, W] are bitmasks of the tree's
    rows that each row sees, itself included, and `bits` [W] are the own bits of the next level's
    rows.
    """

    states: torch.Tensor
    products: torch.Tensor
    words: torch.Tensor
    bits: torch.Tensor


class _Size:
    """The two graphs for B sequences with K guesses a place, and the graphs' tensors."""

    def __init__(
        self, model: AutoregressiveModel, table: BlockTable, batch: int, choices: int
    ) -> None:
        self._model = model
        self._rows = 1 if choices == 1 else WIDTH
        self._inputs = Inputs(Bucket(batch, batch * self._rows, self._rows), table)
        self._inputs.write([])
        device, hidden = model.device, model.decoder.hidden_size
        self._states_BC = torch.zeros(batch, hidden, dtype=model.dtype, device=device)
        shape = batch, self._rows
        self._chosen = _Chosen(
            torch.zeros(*shape, hidden, dtype=model.dtype, device=device),
            torch.ones(shape, dtype=torch.float64, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(self._rows, dtype=torch.int64, device=device),
        )
        self._first_bits = torch.ones_like(self._chosen.bits)
        self._first_bits <<= torch.arange(self._rows, device=device)
        # The guesses of each level; a level writes to the place `_level`.
        places = 1 + _LEVELS, *shape, choices
        self._best = torch.zeros(places, dtype=torch.int64, device=device)
        self._shares = torch.zeros(places, device=device)
        self._level = torch.zeros(1, dtype=torch.int64, device=device)

    def capture(self, capture: graphs.CaptureGraph) -> None:
        """Capture both graphs; raise RuntimeError for a head that waits for the device."""
        self._begin = capture(self._guess_first)
        self._follow = capture(self._guess_level)

    def _guess_first(self) -> None:
        """Guess the tokens after the committed tokens."""
        best_BK, shares_BK = self._ranked(self._states_BC)
        self._level.zero_()
        self._keep(best_BK.unsqueeze(1), shares_BK.unsqueeze(1))
        self._chosen.products.fill_(1.0)
        self._chosen.words.zero_()
        self._chosen.bits.copy_(self._first_bits)
        self._choose(best_BK.unsqueeze(1), shares_BK.unsqueeze(1), self._states_BC.unsqueeze(1))

    def _guess_level(self) -> None:
        """Read the rows that were chosen, and guess what follows each."""
        model, inputs, chosen = self._model, self._inputs, self._chosen
        assert model.cache is not None
        batch, rows = chosen.products.shape
        rotary = model.cache.static_rows(inputs.layout())
        features = model.recycle(chosen.states.flatten(0, 1))
        states = model.run(inputs.token_ids.long(), features, rotary)
        best, shares = self._ranked(states)
        best_BWK, shares_BWK = best.view(batch, rows, -1), shares.view(batch, rows, -1)
        self._keep(best_BWK, shares_BWK)
        if rows == 1:
            inputs.advance()
        else:
            inputs.follow_tree(rows)
        self._choose(best_BWK, shares_BWK, states.view(batch, rows, -1))

    def _ranked(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        picker = Picker(self._model, self._best.shape[-1], None)
        return picker.ranked([], self._model.state_scores(states))

    def _keep(self, best_BRK: torch.Tensor, shares_BRK: torch.Tensor) -> None:
        """Keep a level's guesses for the host; the first level has one row."""
        rows = best_BRK.shape[1]
        self._best[:, :, :rows].index_copy_(0, self._level, best_BRK.unsqueeze(0))
        self._shares[:, :, :rows].index_copy_(0, self._level, shares_BRK.unsqueeze(0))
        self._level += 1

    def _choose(
        self, best_BRK: torch.Tensor, shares_BRK: torch.Tensor, states_BRC: torch.Tensor
    ) -> None:
        """Choose the next level's rows from the guesses after R rows, as `Tree.follow` does."""
        chosen, inputs = self._chosen, self._inputs
        if self._rows == 1:
            inputs.token_ids.copy_(best_BRK.flatten())
            chosen.states.copy_(states_BRC)
            return
        row_count, choices = best_BRK.shape[1:]
        products_BRK = chosen.products[:, :row_count, None] * shares_BRK.double()
        # A guess of probability 0 is chosen last, and the host then leaves it out.
        worth_BN = products_BRK.masked_fill(shares_BRK <= 0.0, -1.0).flatten(1)
        worth_BN[:, 0].fill_(torch.inf)
        picks_BW = worth_BN.sort(dim=1, descending=True, stable=True).indices[:, : self._rows]
        parents_BW = picks_BW // choices
        inputs.token_ids.copy_(best_BRK.flatten(1).gather(1, picks_BW).flatten())
        at_BWC = parents_BW.unsqueeze(-1).expand(-1, -1, states_BRC.shape[-1])
        chosen.states.copy_(states_BRC.gather(1, at_BWC))
        chosen.words.copy_(chosen.words.gather(1, parents_BW) | chosen.bits)
        chosen.bits <<= self._rows
        worth_BN[:, 0].copy_(products_BRK[:, 0, 0])
        chosen.products.copy_(worth_BN.gather(1, picks_BW))
        inputs.ancestors.copy_(chosen.words.flatten())

    def propose(self, sequences: Sequence[HeadSequence], count: int) -> HeadProposal:
        """Guess `count` tokens for each sequence."""
        number, rows = len(sequences), self._rows
        if count > 1:
            parents = [0] * rows if rows > 1 else []
            slices = [
                SequenceSlice(
                    [0] * rows, s.kv.num_computed_tokens, s.kv.pages, rows, parents, kv=s.kv
                )
                for s in sequences
            ]
            self._inputs.write(slices, ahead=rows * (count - 2))
        states = [s.state for s in sequences if s.state is not None]
        torch.stack(states, out=self._states_BC[:number])
        self._begin()
        for _ in range(count - 1):
            self._follow()
        kept = [array[:count, :number] for array in (self._best, self._shares)]
        best_LBWK, shares_LBWK = fetch(kept)
        lists = best_LBWK.tolist(), shares_LBWK.tolist()
        deeper = [_branches(s, i, *lists) for i, s in enumerate(sequences)] if rows > 1 else ()
        best = torch.from_numpy(best_LBWK[:, :, 0].swapaxes(0, 1))
        shares = torch.from_numpy(shares_LBWK[:, :, 0].swapaxes(0, 1)).float()
        return HeadProposal(best[..., 0], best, shares, shares[..., 0], deeper)


def _branches(
    sequence: HeadSequence, at: int, best_LBWK: list[Any], shares_LBWK: list[Any]
) -> list[Branch]:
    """Return the branches of sequence number `at`; grows the tree as the graphs grew it."""
    assert sequence.state is not None
    tree = Tree(sequence, sequence.state)
    tree.add(0, best_LBWK[0][at][0], shares_LBWK[0][at][0])
    for best_BWK, shares_BWK in zip(best_LBWK[1:], shares_LBWK[1:], strict=True):
        first = 1 + len(tree.rows)
        # There may be fewer rows than the graph has room for.
        for row in range(len(tree.follow())):
            tree.add(first + row, best_BWK[at][row], shares_BWK[at][row])
    return tree.branches
