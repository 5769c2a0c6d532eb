"""Log probabilities of prompt and committed tokens: the target's, before any request setting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from outrider.protocol.messages import TokenLogprob
from outrider.sampling.tensors import on
from verifier_svc.state.scheduled_sequence import ScheduledSequence

# Rows of one log-softmax: 40 MB with a vocabulary of 150,000.
_ROWS_AT_ONCE = 64


def logprobs(
    logits_RV: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprob]:
    """For each of `rows`, its token's log probability and rank, and its `count` likeliest tokens.

    A vocabulary of fewer tokens gives all of them. `rows`, `tokens` and `counts` have one entry
    each per result. One copy from the device.
    """
    if not rows:
        return []
    device = logits_RV.device
    values: list[torch.Tensor] = []
    ids: list[torch.Tensor] = []
    index_N = on(device, rows)
    tokens_N = on(device, tokens)
    for at in range(0, len(rows), _ROWS_AT_ONCE):
        log_probs_NV = logits_RV[index_N[at : at + _ROWS_AT_ONCE]].log_softmax(-1)
        own_N1 = log_probs_NV.gather(-1, tokens_N[at : at + _ROWS_AT_ONCE].unsqueeze(-1))
        top = log_probs_NV.topk(min(max(counts), logits_RV.shape[-1]), dim=-1)
        values.append(torch.cat([own_N1, top.values], -1))
        ids.append(torch.cat([(log_probs_NV >= own_N1).sum(-1, keepdim=True), top.indices], -1))
    found = zip(torch.cat(values).tolist(), torch.cat(ids).tolist(), counts, strict=True)
    return [
        TokenLogprob(row[0], tuple(best[1 : 1 + count]), tuple(row[1 : 1 + count]), best[0])
        for row, best, count in found
    ]


def split_scored(
    logits_RV: torch.Tensor, batch: Sequence[ScheduledSequence]
) -> tuple[torch.Tensor, dict[int, list[TokenLogprob]]]:
    """Split a batch's logits into rows to draw from and rows that score prompt tokens.

    Returns the rows to draw from, and by place in the batch the log probabilities of the sequence's
    `scored` tokens.
    """
    if not any(scheduled.scored for scheduled in batch):
        return logits_RV, {}
    drawn: list[int] = []
    rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    first = 0
    for scheduled in batch:
        scored = scheduled.scored
        request = scheduled.sequence.request
        rows += range(first, first + len(scored))
        drawn += range(first + len(scored), first + scheduled.logit_count)
        tokens += request.prompt[scored.start : scored.stop]
        counts += [request.prompt_logprobs or 0] * len(scored)
        first += scheduled.logit_count
    found = iter(logprobs(logits_RV, rows, tokens, counts))
    scores = {
        i: [*islice(found, len(scheduled.scored))]
        for i, scheduled in enumerate(batch)
        if scheduled.scored
    }
    return logits_RV[on(logits_RV.device, drawn, torch.long)], scores
