"""Repetition, presence and frequency penalties, from counts that stay on the device.

A sequence's tokens are counted once: a step adds the tokens that were committed since the last
step. Draft tokens are added to copies, so that a rejected draft leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch

from outrider.sampling.context import Context
from outrider.sampling.tensors import Staged, Staging, triton_works

# If the prompt has a token, the lowest bit of the token's count is set; the other bits count the
# token in the output.
_IN_PROMPT = 1
_IN_OUTPUT = 2


@dataclass(slots=True)
class _Text:
    """A counted sequence.

    The object keeps the list of tokens alive, so that the list's identity is not reused.
    """

    tokens: Sequence[int]
    row: int
    """The text's row of the table."""
    counted: int = 0
    """The number of the text's tokens that are counted."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Rows to reset, and the amounts that are then added to the counts of tokens."""

    fresh: Staged | None
    rows: Staged
    tokens: Staged
    amounts: Staged


class TokenCounts:
    """A table on the device that counts each token in some sequences, with a row for each sequence.

    A sequence is recognised by the identity of its list of tokens and by the prompt's length. The
    list should only grow; a list that became shorter is counted anew. The table keeps at most twice
    as many sequences as the largest batch had. In a full table the least recently used sequence
    loses its row. Such a sequence is counted anew when it comes back, for example after a
    preemption.
    """

    def __init__(self) -> None:
        self._texts: dict[tuple[int, int], _Text] = {}
        # Work that `table` has yet to do. If a forward fails, the next forward does the work.
        self._changes: list[_Change] = []
        self._table_SV = torch.empty(0, 0, dtype=torch.int32)

    def lay_out(self, contexts: Sequence[Context], staging: Staging) -> list[int]:
        """Count the new tokens of a batch's sequences; return each sequence's row of the table."""
        keys = [(id(context.tokens), context.prompt_length) for context in contexts]
        for key in keys:
            known = self._texts.pop(key, None)
            if known is not None:
                self._texts[key] = known  # now behind all sequences of other batches
        fresh: list[int] = []
        rows: list[int] = []
        added: list[int] = []
        amounts: list[int] = []
        found: list[int] = []
        for key, context in zip(keys, contexts, strict=True):
            text = self._texts.get(key)
            if text is None:
                text = self._texts[key] = _Text(context.tokens, self._free_row(2 * len(keys)))
            if text.counted > len(context.tokens):
                text.counted = 0
            prompt: set[int] = set()
            if text.counted == 0:
                fresh.append(text.row)
                prompt = set(context.tokens[: context.prompt_length])
            output = context.tokens[max(text.counted, context.prompt_length) :]
            added += [*prompt, *output]
            amounts += [_IN_PROMPT] * len(prompt) + [_IN_OUTPUT] * len(output)
            rows += [text.row] * (len(prompt) + len(output))
            text.counted = len(context.tokens)
            found.append(text.row)
        if added or fresh:
            change = _Change(
                staging.add(fresh, np.int64) if fresh else None,
                staging.add(rows, np.int64),
                staging.add(added, np.int64),
                staging.add(amounts, np.int32),
            )
            self._changes.append(change)
        return found

    def _free_row(self, most: int) -> int:
        """Return a free row for a new sequence.

        If `most` rows or more are in use, this is the row of the least recently used sequence.
        """
        if len(self._texts) < most:
            return len(self._texts)
        return self._texts.pop(next(iter(self._texts))).row

    def table(self, like: torch.Tensor) -> torch.Tensor:
        """Return a table int32 [sequences, V] on the device of `like` [R, V].

        Each entry is twice the token's count in the output, plus 1 if the prompt has the token.
        """
        vocab_size = like.shape[-1]
        if len(self._texts) > len(self._table_SV):
            size = 1 << (len(self._texts) - 1).bit_length()
            larger = like.new_zeros(size, vocab_size, dtype=torch.int32)
            if len(self._table_SV):
                larger[: len(self._table_SV)] = self._table_SV
            self._table_SV = larger
        for change in self._changes:
            if change.fresh is not None:
                self._table_SV.index_fill_(0, change.fresh.tensor, 0)
            _add_at(self._table_SV, change.rows, change.tokens, change.amounts.tensor)
        self._changes.clear()
        return self._table_SV


class Penalties:
    """The penalties of a batch's rows, laid out before the logits exist."""

    def __init__(
        self, picked: Sequence[tuple[int, Context]], staging: Staging, counts: TokenCounts
    ) -> None:
        """`picked` has the penalised sequences, each with the number of its first row."""
        contexts = [context for _, context in picked]
        row_counts = [context.row_count for context in contexts]
        numbers = [
            (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
            for s in (context.sampling for context in contexts)
        ]
        self._counts = counts
        self._repeats = any(repetition != 1.0 for repetition, _, _ in numbers)
        self._subtracts = any(frequency or presence for _, frequency, presence in numbers)
        texts = counts.lay_out(contexts, staging)
        rows = [row for first, context in picked for row in range(first, first + context.row_count)]
        self._rows_P = staging.add(rows, np.int64)
        self._texts_P = staging.add(np.repeat(texts, row_counts), np.int64)
        self._numbers_3P = staging.add(np.repeat(numbers, row_counts, axis=0).T, np.float32)
        places: list[int] = []
        tokens: list[int] = []
        befores = (before for context in contexts for before in context.drafted_before())
        for place, before in enumerate(befores):
            places += repeat(place, len(before))
            tokens += before
        self._drafted: tuple[Staged, Staged] | None = None
        if tokens:
            self._drafted = staging.add(places, np.int64), staging.add(tokens, np.int64)

    def apply(self, logits_RV: torch.Tensor) -> None:
        """Apply the penalties in place.

        Repetition penalty: Keskar et al., "CTRL", arXiv 1909.05858, over prompt and output.
        Presence and frequency penalty: OpenAI's, over the output. Each row's draft tokens count as
        output.
        """
        counts_PV = self._counts.table(logits_RV)[self._texts_P.tensor]
        if self._drafted is not None:
            places, tokens = self._drafted
            twos = torch.full_like(tokens.tensor, _IN_OUTPUT, dtype=torch.int32)
            _add_at(counts_PV, places, tokens, twos)
        rows_P, numbers_3P = self._rows_P.tensor, self._numbers_3P.tensor
        if triton_works(logits_RV.device):
            from outrider.sampling import penalty_kernel

            penalty_kernel.penalise(logits_RV, rows_P, counts_PV, numbers_3P)
            return
        repetition, frequency, presence = numbers_3P.unsqueeze(-1).unbind()
        kept_PV = logits_RV[rows_P]
        if self._repeats:
            repeated_PV = torch.where(kept_PV < 0, kept_PV * repetition, kept_PV / repetition)
            kept_PV = torch.where(counts_PV > 0, repeated_PV, kept_PV)
        if self._subtracts:
            output_PV = counts_PV >> 1
            kept_PV -= output_PV * frequency
            kept_PV -= (output_PV > 0) * presence
        logits_RV.index_copy_(0, rows_P, kept_PV)


def _add_at(counts_RV: torch.Tensor, rows: Staged, tokens: Staged, amounts: torch.Tensor) -> None:
    """Add amounts to the counts of tokens in some rows. A pair of row and token may recur."""
    at = torch.add(tokens.tensor, rows.tensor, alpha=counts_RV.shape[-1])
    counts_RV.view(-1).index_add_(0, at, amounts)
