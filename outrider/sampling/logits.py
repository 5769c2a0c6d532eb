"""Adjusts logits before they become probabilities: bias, penalties, bans and grammar.

Each row has its own settings and sees the text up to its position, the drafted tokens on its path
included. Rows without settings cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.protocol.messages import SamplingParams
from outrider.protocol.token_tree import depths
from outrider.sampling.tensors import on


@dataclass(slots=True)
class Context:
    """The text behind the rows of one sequence.

    Row i has the logits of the token behind `tokens` and, of `drafted`, the path to row i: its
    first i tokens if `parents` is empty, else as in `protocol.token_tree`. `tokens` are committed,
    and the first `prompt_length` of them are the prompt. `end_ids` end the sequence.
    `mask` holds a bit for each token that the grammar allows, lowest bit first, int32
    [len(drafted) + 1, ceil(V / 32)]; None for no grammar.
    """

    sampling: SamplingParams
    tokens: Sequence[int] = ()
    prompt_length: int = 0
    drafted: Sequence[int] = ()
    end_ids: frozenset[int] = frozenset()
    mask: npt.NDArray[np.int32] | None = None
    parents: Sequence[int] = ()

    @property
    def row_count(self) -> int:
        """Logits rows of the sequence."""
        return len(self.drafted) + 1

    @property
    def depths(self) -> Sequence[int]:
        """How many draft tokens are before each row."""
        return [0, *depths(self.parents)] if self.parents else range(self.row_count)

    def drafted_before(self) -> list[list[int]]:
        """The draft tokens before each row."""
        found: list[list[int]] = [[]]
        parents = self.parents or range(len(self.drafted))
        for token, parent in zip(self.drafted, parents, strict=True):
            found.append([*found[parent], token])
        return found

    @property
    def plain(self) -> bool:
        """Whether the rows need no adjustment."""
        return self.mask is None and not self.sampling.adjusts


def adjust(logits_RV: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
    """Logits [R, V] after bias, penalties, bans (also of early end tokens) and grammar mask.

    `contexts` are the sequences of the rows, in order. Order and formulas follow transformers'
    processors; presence and frequency penalty follow OpenAI. The given tensor is not changed, and
    is returned itself if no row needs an adjustment. A row with no token left is -inf throughout.
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
        pairs = zip(first_rows, contexts, strict=False)
        picked = [(int(row), context) for row, context in pairs if wants(context)]
        if picked:
            apply(logits_RV, picked)
    return logits_RV


_Rows = Sequence[tuple[int, Context]]
"""Pairs of a sequence's first row and its context, for the sequences with some setting."""


def _row_numbers(picked: _Rows) -> list[int]:
    return [row for first, context in picked for row in range(first, first + context.row_count)]


def _bias(logits_RV: torch.Tensor, picked: _Rows) -> None:
    """Add logit_bias."""
    triples = [
        (row, token, value)
        for first, context in picked
        for row in range(first, first + context.row_count)
        for token, value in context.sampling.logit_bias
    ]
    rows, tokens, values = zip(*triples, strict=True)
    biases = on(logits_RV.device, values, logits_RV.dtype)
    logits_RV.index_put_(_index(logits_RV, rows, tokens), biases, accumulate=True)


def _penalise(logits_RV: torch.Tensor, picked: _Rows) -> None:
    """Apply the penalties.

    Repetition penalty: Keskar et al., "CTRL", arXiv 1909.05858, over prompt and output. Presence
    and frequency penalty: OpenAI's, over the output.
    """
    index = on(logits_RV.device, _row_numbers(picked))
    samplings = [context.sampling for _, context in picked for _ in range(context.row_count)]
    kept_PV = logits_RV[index]

    def column(penalties: list[float]) -> torch.Tensor:
        return on(kept_PV.device, penalties, kept_PV.dtype).unsqueeze(-1)

    seen_PV, output_PV = _counts(kept_PV, [context for _, context in picked])
    repetition = column([s.repetition_penalty for s in samplings])
    repeated_PV = torch.where(kept_PV < 0, kept_PV * repetition, kept_PV / repetition)
    kept_PV = torch.where(seen_PV, repeated_PV, kept_PV)
    kept_PV -= output_PV * column([s.frequency_penalty for s in samplings])
    kept_PV -= (output_PV > 0) * column([s.presence_penalty for s in samplings])
    logits_RV.index_copy_(0, index, kept_PV)


def _counts(
    like_PV: torch.Tensor, contexts: Sequence[Context]
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row: whether each token occurs (bool [P, V]), and its count in the output [P, V].

    Both include the drafted tokens before the row.
    """
    vocab_size, device = like_PV.shape[-1], like_PV.device
    prompts = torch.zeros(len(contexts), vocab_size, dtype=torch.bool, device=device)
    outputs = torch.zeros(len(contexts), vocab_size, device=device)
    for i, context in enumerate(contexts):
        prompts[i, on(device, context.tokens[: context.prompt_length], torch.long)] = True
        output = on(device, context.tokens[context.prompt_length :], torch.long)
        outputs[i].index_add_(0, output, torch.ones(len(output), device=device))
    repeats = on(device, [context.row_count for context in contexts])
    counts = outputs.repeat_interleave(repeats, dim=0, output_size=len(like_PV))
    first = 0
    drafted = []
    for context in contexts:
        drafted += [
            (first + row, token)
            for row, before in enumerate(context.drafted_before())
            for token in before
        ]
        first += context.row_count
    if drafted:
        rows, tokens = zip(*drafted, strict=True)
        ones = torch.ones(len(rows), device=device)
        counts.index_put_(_index(like_PV, rows, tokens), ones, accumulate=True)
    in_prompt = prompts.repeat_interleave(repeats, dim=0, output_size=len(like_PV))
    return in_prompt | (counts > 0), counts


def _ban(logits_RV: torch.Tensor, picked: _Rows) -> None:
    """Set banned tokens, and end tokens before `min_tokens`, to -inf."""
    pairs = []
    for first, context in picked:
        generated = len(context.tokens) - context.prompt_length
        for row, depth in enumerate(context.depths, first):
            too_early = generated + depth < context.sampling.min_tokens
            pairs += [(row, token) for token in context.sampling.banned_token_ids]
            if too_early:
                pairs += [(row, token) for token in context.end_ids]
    if pairs:
        rows, tokens = zip(*pairs, strict=True)
        logits_RV[_index(logits_RV, rows, tokens)] = -torch.inf


def _mask(logits_RV: torch.Tensor, picked: _Rows) -> None:
    """Set tokens that the grammar forbids to -inf."""
    device = logits_RV.device
    masks = [context.mask for _, context in picked if context.mask is not None]
    words = on(device, np.concatenate(masks)).unsqueeze(-1)
    bits = (words >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    allowed = bits.flatten(1)[:, : logits_RV.shape[-1]].bool()
    index = on(device, _row_numbers(picked))
    logits_RV.index_copy_(0, index, logits_RV[index].masked_fill_(~allowed, -torch.inf))


def _index(
    like: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return on(like.device, rows), on(like.device, tokens)
