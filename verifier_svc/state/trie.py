"""The verifier's copy of one drafter's guesses for one sequence: a trie below the last committed token.

Knows tokens and committed lengths; not models, streams or who drafts. protos/outrider/v1/drafts.proto has the contract.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from outrider.errors import OutriderError, Reason
from outrider.messages import Proposal, Skip, SparseDistribution, Window


class LookupResult(StrEnum):
    """What a commit found in the trie."""

    CHAIN = "chain"
    """The favourite path goes on behind what was committed: the next draft is there already."""
    BRANCH = "branch"
    """So does a side branch."""
    LATE = "late"
    """Nothing contradicts the commit, but there is nothing behind it yet."""
    MISS = "miss"
    """The commit left the trie."""


@dataclass(slots=True)
class CommitWalk:
    """What `Trie.advance` found: committed tokens that the trie had, and guesses that fell without being committed."""

    matched: int
    result: LookupResult
    wasted: int


@dataclass(slots=True)
class Added:
    """What became of a proposal's tokens: new in the trie (`fresh`), there already (`merged`), committed by then as guessed
    (`passed`), contradicted by the commit or behind such a token (`stale`), or beyond the window (`cut`).
    """

    fresh: int = 0
    merged: int = 0
    passed: int = 0
    stale: int = 0
    cut: int = 0


@dataclass(slots=True)
class Path:
    """Draft tokens from the root's child on, and what each was sampled from (empty when one-hot)."""

    token_ids: list[int]
    distributions: list[SparseDistribution]


@dataclass(eq=False, slots=True)
class _Node:
    """A guess; its children are by token, and the first of them is the favourite."""

    token: int
    distribution: SparseDistribution | None = None
    children: dict[int, _Node] = field(default_factory=dict)

    def favourite(self) -> _Node | None:
        return next(iter(self.children.values()), None)

    def count(self) -> int:
        """Guesses below this one."""
        found, pending = 0, [self]
        while pending:
            children = pending.pop().children
            found += len(children)
            pending += children.values()
        return found


# What stands in for a token that fell: nothing hangs below it.
_STALE, _CUT = _Node(-1), _Node(-1)


class Trie:
    """Speculation trie of one (sequence, drafter). Equal prefixes merge; a node's first child is its favourite."""

    def __init__(self, opened_length: int, window: Window) -> None:
        """The sequence was handed to the drafter with `opened_length` committed tokens."""
        self.window = window
        self.node_count = 0
        """Guesses below the last committed token."""
        self._opened_length = opened_length
        self._root = _Node(-1)
        self._skipped = False
        # The favourite path from the root's child on; None until it is asked for.
        self._favourites: list[_Node] | None = None

    def add(self, proposal: Proposal, committed: list[int]) -> Added:
        """Pass over what was committed since the proposal's base, and hang the rest below the last committed token.

        Raises OutriderError(PROTOCOL_VIOLATION) for a base that no delay explains.
        """
        self._check_base(proposal.base_length, len(committed), "proposal.base_length")
        added, parents, given = Added(), proposal.parents, proposal.distributions
        # A parent's distance from the root (below 0 before it) and node (the root's before it); of a tree, for all places.
        depth, node = proposal.base_length - len(committed), self._root
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
                node = self._hang(node, token, depth, given[i] if given else None, added)
            if parents:
                places.append((depth, node))
        self._favourites = None
        return added

    def _hang(
        self,
        parent: _Node,
        token: int,
        depth: int,
        distribution: SparseDistribution | None,
        added: Added,
    ) -> _Node:
        """The node of a guess, made anew unless there is one or the window has no room."""
        node = parent.children.get(token)
        if node is not None:
            # What it was sampled from is as it was first said: a token that stood here anyway was not drawn by the later draw.
            added.merged += 1
            return node
        if depth > self.window.depth or self.node_count >= self.window.token_count:
            added.cut += 1
            return _CUT
        node = parent.children[token] = _Node(token, distribution)
        self.node_count += 1
        added.fresh += 1
        return node

    def skip(self, skip: Skip, committed: list[int]) -> None:
        """Note that nothing more will come before the next verdict; an older skip says nothing. Raises as `add` does."""
        self._check_base(skip.base_length, len(committed), "skip.base_length")
        if skip.base_length == len(committed):
            self._skipped = True

    def _check_base(self, base_length: int, committed_length: int, field_name: str) -> None:
        if not self._opened_length <= base_length <= committed_length:
            lengths = f"from {self._opened_length}, as it was opened, to the {committed_length} committed tokens"
            message = f"{field_name} must be a length {lengths}, not {base_length}"
            raise OutriderError(Reason.PROTOCOL_VIOLATION, message, field_name)

    def advance(self, new_token_ids: list[int]) -> CommitWalk:
        """Move the root along committed tokens, all of which are new; what is not below it falls."""
        node, before, matched, forked, favoured = self._root, self.node_count, 0, False, True
        for token in new_token_ids:
            child = node.children.get(token)
            if child is None:
                break
            if len(node.children) > 1:
                forked, favoured = True, favoured and child is node.favourite()
            matched += 1
            node = child
        # Branches that go with what the root leaves behind are counted only where there were any.
        left = node.count() if forked else before - matched
        result = LookupResult.CHAIN if favoured else LookupResult.BRANCH
        if not node.children:
            result = LookupResult.LATE
        elif matched < len(new_token_ids):
            result = LookupResult.MISS
        if matched < len(new_token_ids):
            node, left = _Node(-1), 0
        self._root, self.node_count, self._skipped, self._favourites = node, left, False, None
        return CommitWalk(matched, result, before - matched - left)

    def path(self, depth: int) -> Path:
        """The path of favourites from the root, cut at `depth` tokens.

        Chosen by the trie's shape alone: a choice that looked at how likely a sampled token was would bias the output.
        """
        nodes = self._path()[:depth]
        distributions = [node.distribution for node in nodes if node.distribution is not None]
        # A path is sampled from end to end or counts as one-hot from end to end.
        return Path(
            [node.token for node in nodes],
            distributions if len(distributions) == len(nodes) else [],
        )

    def _path(self) -> list[_Node]:
        if self._favourites is None:
            self._favourites, node = [], self._root.favourite()
            while node is not None:
                self._favourites.append(node)
                node = node.favourite()
        return self._favourites

    def length(self, depth: int) -> int:
        """Tokens of the path, at most `depth`."""
        length = len(self._path())
        return length if length < depth else depth

    def ready(self, depth: int) -> bool:
        """Whether waiting could not make the path to `depth` any longer."""
        return self._skipped or len(self._path()) >= depth
