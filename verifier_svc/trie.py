"""The verifier's copy of one drafter's guesses for one sequence: a trie rooted at the last committed token.

Knows tokens and node numbers; not models, streams or who drafts. See protos/outrider/v1/drafts.proto for the numbering.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from outrider.errors import OutriderError, Reason
from outrider.messages import Proposal, Skip, SparseDistribution, Window


class Hit(StrEnum):
    """What a commit found in the trie."""

    CHAIN = "chain"
    """The favourite path went on below what was committed: the next draft is there already."""
    OUTCOME = "outcome"
    """So did a side branch."""
    LATE = "late"
    """What was committed was not contradicted, but there is nothing behind it yet."""
    MISS = "miss"
    """The commit left the trie."""


@dataclass(slots=True)
class Walk:
    """What `Trie.advance` came upon: committed tokens that the trie had, and nodes that were dropped without being committed."""

    matched: int
    hit: Hit
    wasted: int


class Fate(Enum):
    """What became of a proposal."""

    ADDED = auto()
    STALE = auto()
    """Commits since then rule it out, or what it hangs below; or it is for an epoch that is over."""


@dataclass(eq=False, slots=True)
class Node:
    """A guess. `depth` is its distance from node 0 of the epoch; `children` are by token, the favourite first."""

    number: int
    token: int
    depth: int
    distribution: SparseDistribution | None = None
    children: dict[int, Node] = field(default_factory=dict)


@dataclass(slots=True)
class Path:
    """Draft tokens from the root's child on, and what each was sampled from (empty when one-hot)."""

    token_ids: list[int]
    distributions: list[SparseDistribution]


class _Epoch:
    """What was proposed in one epoch.

    `owed` are tokens that were committed below `root` and that no proposal has named yet: it may be under way.
    """

    __slots__ = ("_path", "last", "nodes", "number", "owed", "root", "skipped")

    def __init__(self, number: int, owed: list[int]) -> None:
        self.number = number
        self.owed = owed
        self.root = Node(number=0, token=-1, depth=0)
        self.last = 0
        # The root, and what is below it.
        self.nodes: dict[int, Node] = {0: self.root}
        self.skipped: set[int] = set()
        # That of first-proposed children from the root's on.
        self._path: list[Node] = []

    @property
    def node_count(self) -> int:
        """Nodes below the root."""
        return len(self.nodes) - 1

    @property
    def contradicted(self) -> bool:
        """Whether there are guesses, and others than what was committed."""
        return bool(self.owed and self.root.children)

    def add(self, proposal: Proposal, window: Window) -> Fate:
        self.check_known(proposal.parent_node, "parent_node")
        if proposal.first_node != self.last + 1:
            raise _violation("first_node", f"must be {self.last + 1}, the epoch's next node, not {proposal.first_node}")
        parent = self.nodes.get(proposal.parent_node)
        if parent is None:
            self.last += len(proposal.token_ids)  # the drafter has numbered them, so numbering goes on behind them
            return Fate.STALE
        self._check_room(proposal, parent, window)
        on_path = parent is (self._path[-1] if self._path else self.root)
        number, depth, distributions, nodes = self.last, parent.depth, proposal.distributions, self.nodes
        for i, token in enumerate(proposal.token_ids, 1):
            node = Node(number + i, token, depth + i, distributions[i - 1] if distributions else None, {})
            parent.children[token] = nodes[number + i] = parent = node
            if on_path:
                self._path.append(node)
        self.last += len(proposal.token_ids)
        return Fate.ADDED

    def follow(self, token_ids: list[int]) -> tuple[int, bool]:
        """Move the root along committed tokens as far as there are nodes, the rest is owed; how far that was, and whether along
        first-proposed children alone.
        """
        self.owed += token_ids
        matched, favoured, alone = 0, True, True
        for token in self.owed:
            children = self.root.children
            child = children.get(token)
            if child is None:
                break
            favoured = favoured and child is self._path[matched]
            alone = alone and len(children) == 1
            del self.nodes[self.root.number]
            self.skipped.discard(self.root.number)
            self.root = child
            matched += 1
        del self.owed[:matched]
        if favoured:
            del self._path[:matched]
        else:
            self._path = _favourites(self.root)
        if not alone:
            self._prune()
        return matched, favoured

    def favourites(self) -> list[Node]:
        """The path, from the root's child on; none while something is owed."""
        return [] if self.owed else self._path

    def _prune(self) -> None:
        """Keep the root and what is below it."""
        kept, pending = {self.root.number: self.root}, [self.root]
        while pending:
            for child in pending.pop().children.values():
                kept[child.number] = child
                pending.append(child)
        self.nodes = kept
        self.skipped &= kept.keys()

    def check_known(self, node: int, field_name: str) -> None:
        if node > self.last:
            raise _violation(field_name, f"must be a node of the epoch, at most {self.last}, not {node}")

    def _check_room(self, proposal: Proposal, parent: Node, window: Window) -> None:
        count = len(proposal.token_ids)
        depth = parent.depth - self.root.depth + count
        if depth > window.depth:
            raise _violation("token_ids", f"reach depth {depth}, but the window allows {window.depth}")
        if self.node_count + count > window.node_count:
            raise _violation("token_ids", f"make more than the {window.node_count} nodes that the window allows")
        if proposal.token_ids[0] in parent.children:
            repeated = proposal.token_ids[0]
            raise _violation("token_ids", f"begin with {repeated}, but node {proposal.parent_node} has that child already")


def _favourites(node: Node) -> list[Node]:
    """The path of first-proposed children below a node."""
    path: list[Node] = []
    while node.children:
        node = next(iter(node.children.values()))
        path.append(node)
    return path


class Trie:
    """Speculation trie of one (sequence, drafter).

    What is committed before anything was proposed for it raises the epoch, as a guess that was wrong does; but the proposal may be
    under way and right. So such epochs stay open until the drafter is heard of in a later one, and a proposal for one of them is
    hung below the tokens committed since. Only the first of the open epochs can have any nodes.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self.epoch = 0
        """The one that holds, of which the drafter is told."""
        self._heard = _Epoch(0, [])
        # Later epochs, of which nothing was heard yet, and how many of the tokens committed since the first of them precede each.
        self._unheard: list[tuple[int, int]] = []
        self._since: list[int] = []
        self._dropped = 0

    @property
    def root(self) -> int:
        """The last committed token's node in the epoch that holds."""
        return 0 if self._unheard else self._heard.root.number

    @property
    def last_node(self) -> int:
        """The number of the last node that was proposed in the epoch that holds."""
        return 0 if self._unheard else self._heard.last

    @property
    def open_epochs(self) -> list[int]:
        """Those of which a draft may be waited for, the oldest first; of one that is contradicted only a branch could be of use."""
        later = [number for number, _ in self._unheard]
        return later if self._heard.contradicted else [self._heard.number, *later]

    @property
    def node_count(self) -> int:
        """Guesses below the last committed token."""
        heard = self._heard
        return 0 if heard.owed else len(heard.nodes) - 1

    def add(self, proposal: Proposal) -> Fate:
        """Hang a run of nodes under its parent.

        Raises OutriderError(PROTOCOL_VIOLATION) for what no delay can explain: an epoch or parent that never was, numbers that are
        not consecutive, two siblings of one token, more nodes or depth than the window allows.
        """
        epoch = self._hear(proposal.epoch)
        if epoch is None:
            return Fate.STALE
        fate = epoch.add(proposal, self.window)
        if epoch.owed:
            matched, _ = epoch.follow([])
            if epoch.contradicted:
                return Fate.STALE
            self._dropped += matched
        return fate

    def skip(self, skip: Skip) -> Fate:
        """Note that nothing will come below a node; raises as `add` does."""
        epoch = self._hear(skip.epoch)
        if epoch is None:
            return Fate.STALE
        epoch.check_known(skip.node, "node")
        if skip.node in epoch.nodes:
            epoch.skipped.add(skip.node)
        return Fate.ADDED

    def _hear(self, number: int) -> _Epoch | None:
        """The epoch that a message is for, None if it is of no use; whoever is in it has read what ended those before."""
        if number > self.epoch:
            raise _violation("epoch", f"must be at most {self.epoch}, not {number}")
        if number != self._heard.number:
            at = next((i for i, (later, _) in enumerate(self._unheard) if later == number), None)
            if at is None:
                return None
            self._dropped += self.node_count
            start = self._unheard[at][1]
            self._heard = _Epoch(number, self._since[start:])
            self._forget(at + 1)
        return self._heard

    def _forget(self, count: int) -> None:
        """The first of the epochs of which nothing was heard."""
        del self._unheard[:count]
        start = self._unheard[0][1] if self._unheard else len(self._since)
        del self._since[:start]
        self._unheard = [(number, first - start) for number, first in self._unheard]

    def favourites(self) -> list[int]:
        """Node numbers of the path, in the epoch that it was proposed in."""
        return [node.number for node in self._heard.favourites()]

    def path(self, depth: int) -> Path:
        """The path of first-proposed children from the root, cut at `depth` tokens; siblings come later, as less likely.

        Chosen by the trie's shape alone: a choice that looked at how likely a sampled token was would bias the output.
        """
        nodes = self._heard.favourites()[:depth]
        tokens = [node.token for node in nodes]
        distributions = [node.distribution for node in nodes if node.distribution is not None]
        # A path is sampled from end to end or counts as one-hot from end to end.
        return Path(tokens, distributions if len(distributions) == len(tokens) else [])

    def ready(self, depth: int) -> bool:
        """Whether waiting could not make the path to `depth` any longer."""
        heard, path = self._heard, self._heard.favourites()
        if path:
            return len(path) >= depth or path[-1].number in heard.skipped
        # Who was asked anew may know more than when it skipped.
        return depth == 0 or (not self._unheard and heard.root.number in heard.skipped)

    def length(self, depth: int) -> int:
        """Tokens of the path, at most `depth`."""
        return min(len(self._heard.favourites()), depth)

    def advance(self, token_ids: list[int]) -> Walk:
        """Move the root along committed tokens. If the epoch lacks one of them, another begins."""
        heard, held = self._heard, self.node_count
        owed_before = bool(heard.owed)
        matched, favoured = heard.follow(token_ids)
        left = self.node_count
        hit = Hit.CHAIN if left and favoured else Hit.OUTCOME if left else Hit.LATE
        if heard.contradicted and not owed_before:
            hit = Hit.MISS
        walk = Walk(matched, hit, self._dropped + held - matched - left)
        self._dropped = 0
        if self._unheard:
            self._since += token_ids
        if self._unheard or heard.owed or (heard.last == 0 and token_ids):
            self.epoch += 1
            self._unheard.append((self.epoch, len(self._since)))
            self._trim()
        return walk

    def _trim(self) -> None:
        """No guess reaches further than the window, so what is further back cannot be caught up with."""
        if len(self._unheard) > 2 * self.window.depth:
            count = len(self._unheard) - self.window.depth
            self._heard = _Epoch(self._unheard[count - 1][0], self._since[self._unheard[count - 1][1] :])
            self._forget(count)


def _violation(field_name: str, message: str) -> OutriderError:
    return OutriderError(Reason.PROTOCOL_VIOLATION, f"proposal.{field_name} {message}", f"proposal.{field_name}")
