"""The scores that a head gives behind the beginnings of a text, when it is fed the text's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.heads.model import Extension, HeadModel, Place, Proposal


def scores_of(
    model: HeadModel, text: list[int], features: torch.Tensor, lengths: Sequence[int], steps: int
) -> tuple[torch.Tensor, Proposal]:
    """Scores [length, step, token] behind the first n tokens, all n in one batch."""
    sequences = [model.open(text[:n]) for n in lengths]
    model.extend(
        [Extension(s, [], features[: n - 1], 0) for s, n in zip(sequences, lengths, strict=True)]
    )
    seen = []

    def rank(
        places: Sequence[Place], scores_BV: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(scores_BV)
        tokens = [[text[n + len(run)]] for n, (_, run) in zip(lengths, places, strict=True)]
        return torch.tensor(tokens), torch.ones(len(lengths), 1)

    proposal = model.propose(sequences, steps, rank=rank)
    return torch.stack(seen, dim=1), proposal
