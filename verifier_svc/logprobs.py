"""Log probabilities of committed tokens, accepted, recovered and bonus alike: the target's own, before any setting is applied."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.messages import TokenLogprob


def logprobs(logits_RV: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprob]:
    """For each of `rows`: its token's log probability and those of its `count` likeliest tokens; one copy back."""
    if not rows:
        return []
    log_probs_NV = logits_RV[torch.tensor(rows).to(logits_RV.device)].log_softmax(-1)
    own_N = log_probs_NV.gather(-1, torch.tensor(tokens).to(logits_RV.device).unsqueeze(-1))
    top = log_probs_NV.topk(max(counts), dim=-1)
    values = torch.cat([own_N, top.values], -1).tolist()
    ids = top.indices.tolist()
    return [
        TokenLogprob(row[0], tuple(best[:count]), tuple(row[1 : 1 + count]))
        for row, best, count in zip(values, ids, counts, strict=True)
    ]
