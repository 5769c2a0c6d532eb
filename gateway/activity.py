"""What a gateway's sequences add up to: who wrote how many tokens, how much of the drafts stood, and how fast. For the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.messages import TokenChunk, TokenSource


@dataclass(slots=True)
class Activity:
    """Sums since the gateway started; whoever wants rates takes differences. Times are in seconds."""

    tokens: dict[str, int] = field(
        default_factory=lambda: {source.name.lower(): 0 for source in TokenSource}
    )
    draft_tokens: int = 0
    """Draft tokens verified."""
    accepted_counts: list[int] = field(default_factory=list)
    """By number of accepted draft tokens: the steps that verified a draft and accepted so many."""
    later_tokens: int = 0
    later_token_seconds: float = 0.0
    """From each sequence's first token to its latest; `later_tokens` came in that time."""

    def add(self, chunk: TokenChunk) -> None:
        """A chunk came."""
        for source in chunk.sources:
            self.tokens[source.name.lower()] += 1
        self.draft_tokens += chunk.draft_token_count

    def waited(self, token_count: int, seconds: float) -> None:
        """A sequence's next tokens came after so long."""
        self.later_tokens += token_count
        self.later_token_seconds += seconds

    def snapshot(self) -> dict[str, Any]:
        return asdict(self)


def add_counts(sums: list[int], counts: Sequence[int]) -> None:
    """Add to each sum its count, making more sums as needed."""
    sums += [0] * (len(counts) - len(sums))
    for index, count in enumerate(counts):
        sums[index] += count
