"""The draft tokens of one sequence that one forward verifies."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.token_tree import without_chain


@dataclass(slots=True)
class DraftTree:
    """Draft tokens behind the last committed token: a tree, or a chain if it has no branches.

    The order is depth-first, and each node's favourite child comes first. So the favourite path is
    the first tokens, and it needs no move in the cache when it is accepted.
    """

    token_ids: list[int]
    distributions: list[SparseDistribution]
    """What each token was sampled from; empty for a one-hot draft. Only chains have them."""
    parents: list[int] = field(default_factory=list)
    """Each token's parent, as in `protocol.token_tree`; empty for a chain."""
    drafter_ids: list[str] = field(default_factory=list)
    """Each token's drafter; empty if all are from the favourite path's."""
    favoured: int | None = None
    """Tokens of the favourite path where a grammar cut it; None if it is the first children."""

    def first(self, count: int) -> DraftTree:
        """The first `count` tokens, which are a tree as well."""
        if len(self.token_ids) <= count:
            return self
        return DraftTree(
            self.token_ids[:count],
            self.distributions[:count],
            without_chain(self.parents[:count]),
            self.drafter_ids[:count],
            self.favoured,
        )


NO_DRAFT = DraftTree([], [])
