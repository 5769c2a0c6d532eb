"""The verifier's copy of one drafter's guesses for one sequence: a trie rooted at the last committed token.

Knows tokens and node numbers; not models, streams or who drafts. See protos/outrider/v1/drafts.proto for the numbering.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from outrider.errors import OutriderError, Reason
from outrider.messages import Proposal, Skip, SparseDistribution, Window


class Hit(Enum):
    """What a commit found in the trie."""

    CHAIN = "chain"
    """The favourite path went on below what was committed: the next draft is there already."""
    OUTCOME = "outcome"
    """So did a side branch."""
    LATE = "late"
    """What was committed was not contradicted, but there is nothing behind it yet."""
    MISS = "miss"
    """The commit left the trie."""


@dataclass(frozen=True, slots=True)
class Walk:
    """What `Trie.advance` came upon: committed tokens that the trie had, and nodes that were dropped without being committed."""

    matched: int
    hit: Hit
    wasted: int


class Fate(Enum):
    """What became of a proposal."""

    ADDED = auto()
    STALE = auto()
    """It was made for an older epoch, or hangs under a node that the commit has since ruled out."""


@dataclass(slots=True)
class Node:
    """A guess. `depth` is its distance from node 0 of the epoch; `children` maps tokens to node numbers."""

    token: int
    depth: int
    distribution: SparseDistribution | None = None
    children: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Path:
    """Draft tokens from the root's child on, and what each was sampled from (empty when one-hot)."""

    token_ids: list[int]
    distributions: list[SparseDistribution]


class Trie:
    """Speculation trie of one (sequence, drafter)."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.epoch = 0
        self._restart()

    def _restart(self) -> None:
        self.root = 0
        self._last = 0
        self._nodes: dict[int, Node] = {0: Node(token=-1, depth=0)}
        self._skipped: set[int] = set()
        self._path: list[int] | None = None

    @property
    def node_count(self) -> int:
        """Nodes below the root."""
        return len(self._nodes) - 1

    def add(self, proposal: Proposal) -> Fate:
        """Hang a run of nodes under its parent.

        Raises OutriderError(PROTOCOL_VIOLATION) for what no delay can explain: an epoch or parent that never was, numbers that are
        not consecutive, two siblings of one token, more nodes or depth than the window allows.
        """
        if proposal.epoch < self.epoch:
            return Fate.STALE
        self._check_known(proposal.epoch, proposal.parent_node, "parent_node")
        if proposal.first_node != self._last + 1:
            raise _violation("first_node", f"must be {self._last + 1}, the epoch's next node, not {proposal.first_node}")
        parent = self._nodes.get(proposal.parent_node)
        if parent is None:
            self._last += len(proposal.token_ids)  # the drafter has numbered them, so numbering goes on behind them
            return Fate.STALE
        self._check_room(proposal, parent)
        for i, token in enumerate(proposal.token_ids):
            self._last += 1
            distribution = proposal.distributions[i] if proposal.distributions else None
            node = Node(token, parent.depth + 1, distribution)
            parent.children[token] = self._last
            self._nodes[self._last] = node
            parent = node
        self._path = None
        return Fate.ADDED

    def skip(self, skip: Skip) -> Fate:
        """Note that nothing will come below a node; raises as `add` does."""
        if skip.epoch < self.epoch:
            return Fate.STALE
        self._check_known(skip.epoch, skip.node, "node")
        self._skipped.add(skip.node)
        return Fate.ADDED

    def path(self, depth: int) -> Path:
        """The path of first-proposed children from the root, cut at `depth` tokens; siblings come later, as less likely.

        Chosen by the trie's shape alone: a choice that looked at how likely a sampled token was would bias the output.
        """
        nodes = [self._nodes[number] for number in self._favourites()[:depth]]
        tokens = [node.token for node in nodes]
        distributions = [node.distribution for node in nodes if node.distribution is not None]
        # A path is sampled from end to end or counts as one-hot from end to end.
        return Path(tokens, distributions if len(distributions) == len(tokens) else [])

    def ready(self, depth: int) -> bool:
        """Whether waiting could not make the path to `depth` any longer."""
        path = self._favourites()
        return len(path) >= depth or (path[-1] if path else self.root) in self._skipped

    def length(self, depth: int) -> int:
        """Tokens of the path, at most `depth`."""
        return min(len(self._favourites()), depth)

    def advance(self, token_ids: list[int]) -> Walk:
        """Move the root along committed tokens. If the trie lacks one of them, it is dropped and the epoch rises."""
        if self._last == 0 and token_ids:
            # Nothing was ever hung into it in this epoch.
            self.epoch += 1
            self._skipped.clear()
            return Walk(0, Hit.LATE, 0)
        held, favoured = self.node_count, True
        for matched, token in enumerate(token_ids):
            children = self._nodes[self.root].children
            child = children.get(token)
            if child is None:
                self.epoch += 1
                self._restart()
                return Walk(matched, Hit.MISS if children else Hit.LATE, held - matched)
            favoured &= child == next(iter(children.values()))
            self.root = child
        self._prune()
        hit = Hit.LATE if self.node_count == 0 else Hit.CHAIN if favoured else Hit.OUTCOME
        return Walk(len(token_ids), hit, held - len(token_ids) - self.node_count)

    def _prune(self) -> None:
        """Keep the root and what is below it."""
        kept, pending = {self.root: self._nodes[self.root]}, [self.root]
        while pending:
            for child in self._nodes[pending.pop()].children.values():
                kept[child] = self._nodes[child]
                pending.append(child)
        self._nodes = kept
        self._skipped &= kept.keys()
        self._path = None

    def _favourites(self) -> list[int]:
        """Node numbers of the path, from the root's child on."""
        if self._path is None:
            self._path, node = [], self._nodes[self.root]
            while node.children:
                number = next(iter(node.children.values()))
                self._path.append(number)
                node = self._nodes[number]
        return self._path

    def _check_known(self, epoch: int, node: int, field_name: str) -> None:
        if epoch > self.epoch:
            raise _violation("epoch", f"must be at most {self.epoch}, not {epoch}")
        if node > self._last:
            raise _violation(field_name, f"must be a node of the epoch, at most {self._last}, not {node}")

    def _check_room(self, proposal: Proposal, parent: Node) -> None:
        count = len(proposal.token_ids)
        depth = parent.depth - self._nodes[self.root].depth + count
        if depth > self.window.depth:
            raise _violation("token_ids", f"reach depth {depth}, but the window allows {self.window.depth}")
        if self.node_count + count > self.window.node_count:
            raise _violation("token_ids", f"make more than the {self.window.node_count} nodes that the window allows")
        if proposal.token_ids[0] in parent.children:
            repeated = proposal.token_ids[0]
            raise _violation("token_ids", f"begin with {repeated}, but node {proposal.parent_node} has that child already")


def _violation(field_name: str, message: str) -> OutriderError:
    return OutriderError(Reason.PROTOCOL_VIOLATION, f"proposal.{field_name} {message}", f"proposal.{field_name}")
