"""Adjusts logits before they become probabilities: bias, penalties, bans and grammar.

Each row has its own settings and sees the tokens up to its position, the drafted tokens on its path
included. Rows without settings cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from outrider.sampling.context import Context, Mask
from outrider.sampling.penalties import Penalties, TokenCounts
from outrider.sampling.tensors import Staged, Staging


def adjust(logits_RV: torch.Tensor, contexts: Sequence[Context]) -> torch.Tensor:
    """Apply each row's settings and mask to logits [R, V].

    `contexts` has the context of each sequence, in the order of the rows. This does what
    `Adjustments.apply` does, but keeps no token counts for a later call.
    """
    if all(context.plain for context in contexts):
        return logits_RV
    staging = Staging(logits_RV.device)
    adjustments = Adjustments(contexts, staging, TokenCounts())
    staging.send()
    return adjustments.apply(logits_RV, [context.mask for context in contexts])


class Adjustments:
    """The bias, penalties and bans of a batch's rows, laid out before the logits exist.

    The masks of grammars come later, since they are computed during the forward.
    """

    def __init__(self, contexts: Sequence[Context], staging: Staging, counts: TokenCounts) -> None:
        """`contexts` has the rows' sequences in order; `counts` keeps their token counts."""
        self._contexts = contexts
        self._bias: tuple[Staged, Staged, Staged] | None = None
        self._penalties: Penalties | None = None
        self._bans: tuple[Staged, Staged] | None = None
        if not [context for context in contexts if context.sampling.adjusts]:
            return
        pairs = list(zip(_first_rows(contexts), contexts, strict=True))
        biased = [pair for pair in pairs if pair[1].sampling.logit_bias]
        if biased:
            self._bias = _lay_out_bias(biased, staging)
        penalised = [pair for pair in pairs if pair[1].sampling.penalised]
        if penalised:
            self._penalties = Penalties(penalised, staging, counts)
        self._bans = _lay_out_bans(pairs, staging)

    def apply(self, logits_RV: torch.Tensor, masks: Sequence[Mask | None]) -> torch.Tensor:
        """Return logits [R, V] after bias, penalties, bans, `min_tokens` and grammar masks.

        `masks` has the mask of each sequence, as in `Context`. Order and formulas follow
        transformers' processors; presence and frequency penalty follow OpenAI. The given tensor is
        not changed; it is returned itself if no row needs an adjustment. A row with no token left
        is -inf throughout.
        """
        given = [mask for mask in masks if mask is not None]
        if not (given or self._bias or self._penalties or self._bans):
            return logits_RV
        logits_RV = logits_RV.clone()
        if self._bias is not None:
            rows, tokens, biases = self._bias
            # A row's `logit_bias` has each token only once.
            at = rows.tensor, tokens.tensor
            logits_RV[at] = logits_RV[at] + biases.tensor
        if self._penalties is not None:
            self._penalties.apply(logits_RV)
        if self._bans is not None:
            rows, tokens = self._bans
            logits_RV[rows.tensor, tokens.tensor] = -torch.inf
        if given:
            _mask(logits_RV, _first_rows(self._contexts), masks)
        return logits_RV


_Rows = Sequence[tuple[int, Context]]
"""Pairs of a sequence's first row and its context."""


def _first_rows(contexts: Sequence[Context]) -> list[int]:
    return [0, *accumulate(context.row_count for context in contexts)][:-1]


def _lay_out_bias(picked: _Rows, staging: Staging) -> tuple[Staged, Staged, Staged]:
    """Return the rows, tokens and values of logit_bias."""
    triples = [
        (row, token, value)
        for first, context in picked
        for row in range(first, first + context.row_count)
        for token, value in context.sampling.logit_bias
    ]
    rows, tokens, values = zip(*triples, strict=True)
    return (
        staging.add(rows, np.int64),
        staging.add(tokens, np.int64),
        staging.add(values, np.float32),
    )


def _lay_out_bans(pairs: _Rows, staging: Staging) -> tuple[Staged, Staged] | None:
    """Return the rows and tokens of banned tokens, and of end tokens before `min_tokens`."""
    rows: list[int] = []
    tokens: list[int] = []
    for first, context in pairs:
        sampling = context.sampling
        if not (sampling.banned_token_ids or sampling.min_tokens):
            continue
        generated = len(context.tokens) - context.prompt_length
        for row, depth in enumerate(context.depths, first):
            banned = [*sampling.banned_token_ids]
            if generated + depth < sampling.min_tokens:
                banned += context.end_ids
            rows += [row] * len(banned)
            tokens += banned
    if not rows:
        return None
    return staging.add(rows, np.int64), staging.add(tokens, np.int64)


def _mask(logits_RV: torch.Tensor, firsts: Sequence[int], masks: Sequence[Mask | None]) -> None:
    """Set the logits of tokens that grammars forbid to -inf, in place.

    Raises RuntimeError for a mask that has no bits for some tokens.
    """
    vocab_size = logits_RV.shape[1]
    picked = [(first, mask) for first, mask in zip(firsts, masks, strict=True) if mask is not None]
    staging = Staging(logits_RV.device)
    words = staging.add(np.concatenate([mask for _, mask in picked]))
    rows = staging.add(
        np.concatenate([np.arange(first, first + len(mask)) for first, mask in picked])
    )
    staging.send()
    words_RW = words.tensor
    if 32 * words_RW.shape[1] < vocab_size:
        covered = 32 * words_RW.shape[1]
        raise RuntimeError(f"a mask covers {covered} tokens of a vocabulary of {vocab_size}")
    forbidden_RV = _zeros(words_RW)[:, :vocab_size]
    if len(words_RW) == len(logits_RV):
        logits_RV.masked_fill_(forbidden_RV, -torch.inf)
    else:
        logits_RV[rows.tensor] = logits_RV[rows.tensor].masked_fill(forbidden_RV, -torch.inf)


def _zeros(words_RW: torch.Tensor) -> torch.Tensor:
    """Return whether each bit of int32 masks [R, W] is zero, lowest first: bool [R, 32 W]."""
    bytes_RB = words_RW.view(torch.uint8)
    if words_RW.device.type == "cpu":
        # For few rows, NumPy takes half the time of a look-up in the table below.
        return torch.from_numpy(_unpacked(~bytes_RB.numpy()))
    return functional.embedding(bytes_RB.int(), _zeros_of_bytes(words_RW.device)).flatten(1)


@cache
def _zeros_of_bytes(device: torch.device) -> torch.Tensor:
    """Return whether each bit of every byte is zero: bool [256, 8]."""
    inverted = ~np.arange(256, dtype=np.uint8)
    return torch.from_numpy(_unpacked(inverted[:, None])).to(device)


def _unpacked(bytes_RB: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    return np.unpackbits(bytes_RB, axis=1, bitorder="little").view(np.bool_)
