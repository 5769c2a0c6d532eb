"""The scores that a head gives after prefixes of a text, if it is fed the text's next tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.heads.model import Extension, HeadModel, HeadProposal, Place


def scores_of(
    model: HeadModel,
    text: list[int],
    features: torch.Tensor,
    lengths: Sequence[int],
    steps: int,
    *,
    piece: int | None = None,
) -> tuple[torch.Tensor, HeadProposal]:
    """Return scores [length, step, token], and the proposal.

    The scores at a length n of `lengths` are those after the first n tokens of the text. One batch
    computes all lengths.

    With `piece`, the features of a text come in pieces of `piece` rows.
    """
    sequences = [model.open(text[:n]) for n in lengths]
    for first in range(0, max(lengths), piece or max(lengths)):
        end = first + (piece or max(lengths))
        news = [
            Extension(sequence, [], features[first : min(end, n - 1)], first)
            for sequence, n in zip(sequences, lengths, strict=True)
            if first < n - 1
        ]
        if news:
            model.extend(news)
    seen = []

    def rank(
        places: Sequence[Place], scores_BV: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(scores_BV)
        tokens = [[text[n + len(run)]] for n, (_, run) in zip(lengths, places, strict=True)]
        return torch.tensor(tokens), torch.ones(len(lengths), 1)

    proposal = model.propose(sequences, steps, rank=rank)
    return torch.stack(seen, dim=1), proposal
