"""Sums over a gateway's sequences for the page: tokens by author, accepted drafts, and speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.protocol.messages import TokenChunk, TokenSource


@dataclass(slots=True)
class Activity:
    """Sums since the gateway started. A reader subtracts two snapshots to get rates."""

    tokens: dict[str, int] = field(
        default_factory=lambda: {source.name.lower(): 0 for source in TokenSource}
    )
    draft_tokens: int = 0
    """Draft tokens verified."""
    accepted_counts: list[int] = field(default_factory=list)
    """Entry i counts the steps that verified a draft and accepted i of its tokens."""
    chain_steps: int = 0
    """Steps of a sequence that verified a chain of draft tokens."""
    chain_tokens: int = 0
    """Tokens that these steps committed."""
    tree_steps: int = 0
    """Steps of a sequence that verified draft tokens with branches."""
    tree_tokens: int = 0
    """Tokens that these steps committed."""
    side_draft_tokens: int = 0
    """Draft tokens verified beside the main paths."""
    later_tokens: int = 0
    """Tokens after the first chunk of their sequence."""
    later_token_seconds: float = 0.0
    """The time that `later_tokens` took, summed over sequences."""

    def add(self, chunk: TokenChunk) -> None:
        """Count the tokens of a chunk by source, and the draft tokens it verified."""
        for source in chunk.sources:
            self.tokens[source.name.lower()] += 1
        self.draft_tokens += chunk.draft_token_count
        self.side_draft_tokens += chunk.side_draft_token_count

    def add_step(self, chunk: TokenChunk) -> None:
        """Count a chunk of one step that verified a draft, by the draft's shape."""
        if chunk.side_draft_token_count:
            self.tree_steps += 1
            self.tree_tokens += len(chunk.token_ids)
        else:
            self.chain_steps += 1
            self.chain_tokens += len(chunk.token_ids)

    def waited(self, token_count: int, seconds: float) -> None:
        """Record that a sequence got `token_count` tokens `seconds` after its last ones."""
        self.later_tokens += token_count
        self.later_token_seconds += seconds

    def snapshot(self) -> dict[str, Any]:
        """The sums by name, as JSON has them."""
        return asdict(self)


def add_counts(sums: list[int], counts: Sequence[int]) -> None:
    """Add `counts` to `sums` entry by entry, in place. `sums` grows as needed."""
    sums += [0] * (len(counts) - len(sums))
    for index, count in enumerate(counts):
        sums[index] += count
