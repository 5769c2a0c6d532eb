"""What a request does to the logits before they become probabilities: bias, penalties, bans and grammar.

Each row has its own settings, and sees the text as it stands at its position, drafted tokens included. Rows that ask for nothing
pay nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.messages import SamplingParams
from outrider.sampling.tensors import on


@dataclass(slots=True)
class Context:
    """The rows of one sequence: row i is the target's word on what follows `tokens` and the first i of `drafted`.

    `tokens` are the committed ones, of which the first `prompt_length` are the prompt; `end_ids` end the sequence. `mask` is None
    or, for each row, a bit for each token that the grammar allows: int32 [len(drafted) + 1, ceil(V / 32)], the lowest bit first.
    """

    sampling: SamplingParams
    tokens: Sequence[int] = ()
    prompt_length: int = 0
    drafted: Sequence[int] = ()
    end_ids: frozenset[int] = frozenset()
    mask: npt.NDArray[np.int32] | None = None

    @property
    def row_count(self) -> int:
        return len(self.drafted) + 1

    @property
    def plain(self) -> bool:
        """Whether its logits stay as they are."""
        return self.mask is None and not self.sampling.adjusts


def adjust(logits_RV: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
    """Logits after bias, repetition, presence and frequency penalty, banned and too early end tokens, and grammar mask.

    The order and the formulas are those of transformers' processors; presence and frequency are OpenAI's. The given tensor is
    not changed, and is what comes back if no row asks for anything. A row that nothing is left of is -inf throughout.
    """
    if all(context.plain for context in contexts):
        return logits_RV
    first_rows = np.cumsum([0] + [context.row_count for context in contexts])
    logits_RV = logits_RV.clone()
    for wants, apply in (
        (lambda c: bool(c.sampling.logit_bias), _bias),
        (lambda c: c.sampling.penalised, _penalise),
        (lambda c: bool(c.sampling.banned_token_ids or c.sampling.min_tokens), _ban),
        (lambda c: c.mask is not None, _mask),
    ):
        picked = [
            (int(row), context)
            for row, context in zip(first_rows, contexts, strict=False)
            if wants(context)
        ]
        if picked:
            apply(logits_RV, picked)
    return logits_RV


_Rows = Sequence[tuple[int, Context]]
"""Sequences that ask for something, each with the number of its first row."""


def _bias(logits_RV: torch.Tensor, picked: _Rows) -> None:
    pairs = [
        (row, token, value)
        for first, context in picked
        for row in range(first, first + context.row_count)
        for token, value in context.sampling.logit_bias
    ]
    rows, tokens, values = zip(*pairs, strict=True)
    logits_RV.index_put_(
        _index(logits_RV, rows, tokens),
        on(logits_RV.device, values, logits_RV.dtype),
        accumulate=True,
    )


def _penalise(logits_RV: torch.Tensor, picked: _Rows) -> None:
    """Repetition penalty: Keskar et al., "CTRL", arXiv 1909.05858, over prompt and output; presence and frequency: the output."""
    rows = [row for first, context in picked for row in range(first, first + context.row_count)]
    index = on(logits_RV.device, rows)
    of_row = [context.sampling for _, context in picked for _ in range(context.row_count)]
    kept = logits_RV[index]
    seen, output = _counts(kept, [context for _, context in picked])
    repetition = on(kept.device, [s.repetition_penalty for s in of_row], kept.dtype).unsqueeze(-1)
    kept = torch.where(seen, torch.where(kept < 0, kept * repetition, kept / repetition), kept)
    kept -= output * on(kept.device, [s.frequency_penalty for s in of_row], kept.dtype).unsqueeze(
        -1
    )
    kept -= (output > 0) * on(
        kept.device, [s.presence_penalty for s in of_row], kept.dtype
    ).unsqueeze(-1)
    logits_RV.index_copy_(0, index, kept)


def _counts(
    like_PV: torch.Tensor, contexts: Sequence[Context]
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of the sequences: whether a token occurs at all (bool), and how often in the output, drafted tokens included."""
    vocab_size, device = like_PV.shape[-1], like_PV.device
    prompts = torch.zeros(len(contexts), vocab_size, dtype=torch.bool, device=device)
    outputs = torch.zeros(len(contexts), vocab_size, device=device)
    for i, context in enumerate(contexts):
        prompts[i, on(device, context.tokens[: context.prompt_length], torch.long)] = True
        output = on(device, context.tokens[context.prompt_length :], torch.long)
        outputs[i].index_add_(0, output, torch.ones(len(output), device=device))
    repeats = on(device, [context.row_count for context in contexts])
    counts = outputs.repeat_interleave(repeats, dim=0, output_size=len(like_PV))
    first, drafted = 0, []
    for context in contexts:
        drafted += [
            (first + j, token)
            for i, token in enumerate(context.drafted)
            for j in range(i + 1, context.row_count)
        ]
        first += context.row_count
    if drafted:
        rows, tokens = zip(*drafted, strict=True)
        counts.index_put_(
            _index(like_PV, rows, tokens), torch.ones(len(rows), device=device), accumulate=True
        )
    return prompts.repeat_interleave(repeats, dim=0, output_size=len(like_PV)) | (
        counts > 0
    ), counts


def _ban(logits_RV: torch.Tensor, picked: _Rows) -> None:
    pairs = []
    for first, context in picked:
        generated = len(context.tokens) - context.prompt_length
        for i in range(context.row_count):
            too_early = generated + i < context.sampling.min_tokens
            pairs += [(first + i, token) for token in context.sampling.banned_token_ids]
            pairs += [(first + i, token) for token in context.end_ids] if too_early else []
    if pairs:
        rows, tokens = zip(*pairs, strict=True)
        logits_RV[_index(logits_RV, rows, tokens)] = -torch.inf


def _mask(logits_RV: torch.Tensor, picked: _Rows) -> None:
    rows = [row for first, context in picked for row in range(first, first + context.row_count)]
    words = np.concatenate([context.mask for _, context in picked if context.mask is not None])
    bits = (
        on(logits_RV.device, words).unsqueeze(-1)
        >> torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    ) & 1
    allowed = bits.flatten(1)[:, : logits_RV.shape[-1]].bool()
    index = on(logits_RV.device, rows)
    logits_RV.index_copy_(0, index, logits_RV[index].masked_fill_(~allowed, -torch.inf))


def _index(
    like: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return on(like.device, rows), on(like.device, tokens)
