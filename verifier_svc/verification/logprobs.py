"""Log probabilities of prompt and committed tokens: the target's, before a request's settings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.protocol.messages import TokenLogprob
from outrider.sampling.tensors import Staging
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.verification.draft import AcceptResult

# The number of rows of one log-softmax, which takes 40 MB with a vocabulary of 150,000.
_ROWS_AT_ONCE = 64


class Logprobs:
    """The log probabilities that at least one request of a batch wants, laid out beforehand.

    The log probabilities are computed for all rows of a draft, since only the device knows which
    rows will be committed. So they come with the same copy as the step's other results.
    """

    def __init__(self, batch: Sequence[ScheduledSequence], staging: Staging) -> None:
        rows: list[int] = []
        drawn_rows: list[int] = []
        tokens: list[int] = []
        drawn: list[int] = []
        counts: list[int] = []
        drawn_counts: list[int] = []
        # Keyed by a sequence's place in the batch: which results belong to its scored tokens, and
        # the index of the first result of its drawn rows.
        self._scored: dict[int, range] = {}
        self._drawn: dict[int, int] = {}
        self._sampling = [i for i, scheduled in enumerate(batch) if scheduled.samples]
        first = drawn_first = 0
        for i, scheduled in enumerate(batch):
            request = scheduled.sequence.request
            scored = scheduled.scored
            if scored:
                self._scored[i] = range(len(rows), len(rows) + len(scored))
                rows += range(first, first + len(scored))
                tokens += request.prompt[scored.start : scored.stop]
                counts += [request.prompt_logprobs or 0] * len(scored)
            row_count = scheduled.logit_count - len(scored)
            if request.top_logprobs is not None and row_count:
                self._drawn[i] = len(drawn)
                begin = first + len(scored)
                drawn_rows += range(begin, begin + row_count)
                drawn += range(drawn_first, drawn_first + row_count)
                drawn_counts += [request.top_logprobs] * row_count
            first += scheduled.logit_count
            drawn_first += row_count
        self._counts = counts + drawn_counts
        self._scored_count = len(rows)
        self._rows_N = staging.add(rows + drawn_rows, np.int64)
        self._tokens_S = staging.add(tokens, np.int64)
        self._drawn_D = staging.add(drawn, np.int64)

    def tensors(self, logits_RV: torch.Tensor, committed_R: torch.Tensor) -> list[torch.Tensor]:
        """Return log probabilities [N, 1 + K], and the ranks and ids [N, 1 + K].

        The first column has the log probability and the rank of the token that follows the row. The
        other columns have the log probabilities and the ids of the K likeliest tokens.

        `logits_RV` are all the batch's logits. `committed_R` has for each row the token that
        follows if the row is committed.
        """
        index_N = self._rows_N.tensor
        tokens_N = torch.cat([self._tokens_S.tensor, committed_R[self._drawn_D.tensor]])
        most = min(max(self._counts), logits_RV.shape[-1])
        values: list[torch.Tensor] = []
        ids: list[torch.Tensor] = []
        for at in range(0, len(index_N), _ROWS_AT_ONCE):
            log_probs_NV = logits_RV[index_N[at : at + _ROWS_AT_ONCE]].log_softmax(-1)
            own_N1 = log_probs_NV.gather(-1, tokens_N[at : at + _ROWS_AT_ONCE].unsqueeze(-1))
            top = log_probs_NV.topk(most, dim=-1)
            values.append(torch.cat([own_N1, top.values], -1))
            ids.append(torch.cat([(log_probs_NV >= own_N1).sum(-1, keepdim=True), top.indices], -1))
        return [torch.cat(values), torch.cat(ids)]

    def of_prompts(self, found: Sequence[np.ndarray]) -> dict[int, list[TokenLogprob]]:
        """Return the results of scored prompt tokens, keyed by place in the batch.

        `found` has the tensors of `tensors`, on the host.
        """
        return {i: self._read(found, span) for i, span in self._scored.items()}

    def of_committed(
        self, found: Sequence[np.ndarray], results: Sequence[AcceptResult]
    ) -> dict[int, list[TokenLogprob]]:
        """Return the results of accepted tokens and the next token, keyed by place in the batch.

        `results` has an entry for each sequence for which a token is drawn.
        """
        by_place = dict(zip(self._sampling, results, strict=True))
        return {
            i: self._read(
                found, [self._scored_count + first + row for row in (0, *by_place[i].rows)]
            )
            for i, first in self._drawn.items()
        }

    def _read(self, found: Sequence[np.ndarray], rows: Sequence[int]) -> list[TokenLogprob]:
        read: list[TokenLogprob] = []
        for row in rows:
            best, ranked = (each[row].tolist() for each in found)
            end = 1 + self._counts[row]
            read.append(TokenLogprob(best[0], tuple(ranked[1:end]), tuple(best[1:end]), ranked[0]))
        return read
