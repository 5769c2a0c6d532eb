"""The draft tokens of one sequence that one forward verifies."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.messages import SparseDistribution


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
    """Each token's parent, as in `outrider.token_tree`; empty for a chain."""


NO_DRAFT = DraftTree([], [])
