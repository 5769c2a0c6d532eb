"""The verifier's copy of one drafter's guesses for one sequence.

The trie's root is the last committed token. A trie knows tokens and committed lengths, but no
models, streams or drafters. The contract is in protos/outrider/v1/drafts.proto. `DraftTree` is the
part of a trie that one forward verifies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import Proposal, Skip, SparseDistribution, Window
from outrider.protocol.token_tree import without_chain


@dataclass(slots=True)
class DraftTree:
    """Draft tokens that one forward verifies: a tree, or a chain if it has no branches.

    The root is the last committed token.

    The order is depth-first, and each node's main child comes first. So the first tokens are the
    main path, which needs no move in the cache when it is accepted.
    """

    token_ids: list[int]
    distributions: list[SparseDistribution]
    """The distribution that each token was sampled from; empty for a one-hot draft. Only chains
    have distributions."""
    parents: list[int] = field(default_factory=list)
    """Each token's parent, as in `protocol.token_tree`; empty for a chain."""
    drafter_ids: list[str] = field(default_factory=list)
    """Each token's drafter; empty if the main path's drafter guessed them all."""
    main_length: int | None = None
    """Length of the main path if a grammar cut the tree; if None, first children make the path."""

    def first(self, count: int) -> DraftTree:
        """Return a tree of the first `count` tokens."""
        if len(self.token_ids) <= count:
            return self
        return DraftTree(
            self.token_ids[:count],
            self.distributions[:count],
            without_chain(self.parents[:count]),
            self.drafter_ids[:count],
            self.main_length,
        )


NO_DRAFT = DraftTree([], [])


class LookupResult(StrEnum):
    """The result of looking for a draft in the trie after a commit."""

    CHAIN = "chain"
    """The main path goes on after the committed tokens: the next draft is there already."""
    BRANCH = "branch"
    """A branch goes on after the committed tokens."""
    LATE = "late"
    """Nothing contradicts the commit, but no guess after it has arrived yet."""
    MISS = "miss"
    """The commit left the trie."""


@dataclass(slots=True)
class CommitWalk:
    """The result of `Trie.advance`."""

    matched: int
    """Committed tokens that the trie had."""
    on_main_path: int
    """Committed tokens that the trie had on its main path."""
    result: LookupResult
    wasted: int
    """Guesses that were dropped without being committed."""


@dataclass(slots=True)
class AddResult:
    """What became of a proposal's tokens; each field is a number of tokens."""

    fresh: int = 0
    """Tokens that are new in the trie."""
    merged: int = 0
    """Tokens that were in the trie before."""
    passed: int = 0
    """Tokens that are committed already, as guessed."""
    stale: int = 0
    """Tokens that the commit contradicted, or that follow such a token."""
    cut: int = 0
    """Tokens for which the window had no room."""


@dataclass(eq=False, slots=True)
class Node:
    """A guess. `children` maps a token to the next guess; the first is the main guess."""

    token: int
    distribution: SparseDistribution | None = None
    confidence: float = 0.0
    """The drafter's estimate that the token is right if its parent is; 0 if it gave none."""
    children: dict[int, Node] = field(default_factory=dict)

    def first_children(self) -> list[Node]:
        """Return the main path below this node."""
        found: list[Node] = []
        children = self.children
        while children:
            node = next(iter(children.values()))
            found.append(node)
            children = node.children
        return found

    def count(self) -> int:
        """Return the number of guesses below this node."""
        found = 0
        pending = [self]
        while pending:
            children = pending.pop().children
            found += len(children)
            pending += children.values()
        return found


# A dropped token gets one of these nodes; no token is added below them.
_STALE = Node(-1)
_CUT = Node(-1)


class Trie:
    """The guesses of one drafter for one sequence. Equal prefixes merge."""

    def __init__(self, opened_length: int, window: Window) -> None:
        """The sequence was announced to the drafter with `opened_length` committed tokens."""
        self.window = window
        self.node_count = 0
        """Guesses below the last committed token."""
        self._opened_length = opened_length
        self._root = Node(-1)
        self._skipped = False
        self.main_path: list[Node] = []
        """The main path below the last committed token."""

    def add(self, proposal: Proposal, committed: list[int]) -> AddResult:
        """Compare a proposal with the tokens committed since its base, and add its later guesses.

        `committed` are all committed tokens. Raises OutriderError(PROTOCOL_VIOLATION) for a base
        that even a late message could not have.
        """
        self._check_base(proposal.base_length, len(committed))
        added = AddResult()
        parents = proposal.parents
        # `depth` and `node` belong to the next token's parent. A committed token has a depth of at
        # most 0, and the root as its node. `places` has the depth and the node of each token of a
        # tree.
        depth = proposal.base_length - len(committed)
        node = self._root
        places = [(depth, node)]
        for i, token in enumerate(proposal.token_ids):
            if parents:
                depth, node = places[parents[i]]
            depth += 1
            if node is _CUT:
                added.cut += 1
            elif node is _STALE or (depth <= 0 and token != committed[depth - 1]):
                added.stale += 1
                node = _STALE
            elif depth <= 0:
                added.passed += 1
            else:
                node = self._add_child(node, proposal, i, depth, added)
            if parents:
                places.append((depth, node))
        return added

    def _add_child(
        self, parent: Node, proposal: Proposal, i: int, depth: int, added: AddResult
    ) -> Node:
        """Return the node of token `i`: an old node, a new node, or _CUT if there is no room."""
        token = proposal.token_ids[i]
        node = parent.children.get(token)
        if node is not None:
            # The token was in the trie before it was drawn again, so its first distribution stays.
            added.merged += 1
            return node
        if depth > self.window.depth or self.node_count >= self.window.token_count:
            added.cut += 1
            return _CUT
        distribution = proposal.distributions[i] if proposal.distributions else None
        node = Node(token, distribution)
        if parent is (self.main_path[-1] if self.main_path else self._root):
            self.main_path.append(node)
        parent.children[token] = node
        if proposal.confidences and distribution is None:
            node.confidence = proposal.confidences[i]
        self.node_count += 1
        added.fresh += 1
        return node

    def skip(self, skip: Skip, committed: list[int]) -> None:
        """Note that no draft will come before the next verdict.

        A skip for an older verdict has no effect. Raises as `add` does.
        """
        self._check_base(skip.base_length, len(committed))
        if skip.base_length == len(committed):
            self._skipped = True

    def _check_base(self, base_length: int, committed_length: int) -> None:
        if not self._opened_length <= base_length <= committed_length:
            message = (
                f"base_length must be a length from {self._opened_length}, as it was opened,"
                f" to the {committed_length} committed tokens, not {base_length}"
            )
            raise OutriderError(Reason.PROTOCOL_VIOLATION, message, "base_length")

    def advance(self, new_token_ids: list[int]) -> CommitWalk:
        """Move the root along newly committed tokens and drop the guesses that are not below it."""
        node = self._root
        before = self.node_count
        main_path = self.main_path
        matched = on_main_path = 0
        forked = False
        for token in new_token_ids:
            child = node.children.get(token)
            if child is None:
                break
            if len(node.children) > 1:
                forked = True
            if on_main_path == matched and child is main_path[matched]:
                on_main_path += 1
            matched += 1
            node = child
        # Without a fork on the way, only the matched nodes leave the trie.
        left = node.count() if forked else before - matched
        missed = matched < len(new_token_ids)
        followed = on_main_path == matched
        if not node.children:
            result = LookupResult.LATE
        elif missed:
            result = LookupResult.MISS
        else:
            result = LookupResult.CHAIN if followed else LookupResult.BRANCH
        if missed:
            node = Node(-1)
            left = 0
            self.main_path = []
        else:
            self.main_path = main_path[matched:] if followed else node.first_children()
        self._root = node
        self.node_count = left
        self._skipped = False
        return CommitWalk(matched, on_main_path, result, before - matched - left)

    @property
    def root(self) -> Node:
        """The last committed token; its children are the guesses after it."""
        return self._root

    @property
    def is_chain(self) -> bool:
        """True if the trie has no guess beside the main path."""
        return self.node_count == len(self.main_path)

    def is_contradicted(self, new_token_ids: list[int]) -> bool:
        """Return whether the main path differs from `new_token_ids` at a place that both have."""
        for node, token in zip(self.main_path, new_token_ids, strict=False):
            if node.token != token:
                return True
        return False

    def path(self, depth: int) -> DraftTree:
        """Return the main path from the root, at most `depth` tokens.

        Only the trie's shape chooses the path. A choice by the probability of a sampled token would
        bias the output.
        """
        nodes = self.main_path[:depth]
        distributions: list[SparseDistribution] = []
        if nodes and nodes[0].distribution is not None:
            distributions = [node.distribution for node in nodes if node.distribution is not None]
        # A path that is sampled only in part counts as one-hot.
        if len(distributions) < len(nodes):
            distributions = []
        return DraftTree([node.token for node in nodes], distributions)

    def ready(self, depth: int) -> bool:
        """True if no wait is needed: the main path has `depth` tokens, or the drafter skipped."""
        return self._skipped or len(self.main_path) >= depth
