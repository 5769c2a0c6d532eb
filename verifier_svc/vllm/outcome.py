"""The result of a step of vLLM for one request, and the states of the tokens that it computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from verifier_svc.drafts.features import ComputedTokens, FeatureSource
from verifier_svc.state.scheduled_sequence import ScheduledSequence


@dataclass(slots=True)
class Outcome:
    """The result of a step for one request."""

    request_id: str
    drafted: list[int]
    """The draft tokens that the forward verified."""
    committed: list[int]
    """The accepted draft tokens and the target's own, cut where the request ended."""

    @property
    def accepted_count(self) -> int:
        """The number of draft tokens with which the committed tokens begin."""
        count = 0
        for guess, token in zip(self.drafted, self.committed, strict=False):
            if guess != token:
                break
            count += 1
        return count


class StepStates(FeatureSource, Protocol):
    """The hidden states of vLLM's steps; `verifier_svc.vllm.features.VllmStates` keeps them."""

    @property
    def first_rows(self) -> Mapping[str, int]:
        """Maps a request of the last forward to the row of its first token."""

    def clear(self) -> None:
        """Free the states of the last forward."""


def computed_tokens(
    first_rows: Mapping[str, int],
    batch: Mapping[str, ScheduledSequence],
    outcomes: Iterable[Outcome],
) -> Iterator[ComputedTokens]:
    """Yield the tokens that a step computed of each request, without rejected draft tokens."""
    for outcome in outcomes:
        first = first_rows.get(outcome.request_id)
        scheduled = batch.get(outcome.request_id)
        if first is None or scheduled is None:
            continue
        count = len(scheduled.token_ids) + outcome.accepted_count
        rows = range(first, first + count)
        draws = bool(outcome.committed)
        yield ComputedTokens(scheduled.sequence, scheduled.start, rows, draws)
