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
class _Branch:
    """A guess beside the path. `depth` is its distance from node 0 of the epoch; `children` are by token, the favourite first."""

    number: int
    token: int
    depth: int
    children: dict[int, _Branch] = field(default_factory=dict)


@dataclass(slots=True)
class Path:
    """Draft tokens from the root's child on, and what each was sampled from (empty when one-hot)."""

    token_ids: list[int]
    distributions: list[SparseDistribution]


class _Epoch:
    """What was proposed in one epoch.

    `owed` are tokens that were committed below `root` and that no proposal has named yet: it may be under way. The path, that of
    first-proposed children from the root's on, is flat lists, since mostly there is nothing beside it.
    """

    __slots__ = ("_branches", "_depth", "_laws", "_sides", "last", "number", "numbers", "owed", "root", "skipped", "tokens")

    def __init__(self, number: int, owed: list[int]) -> None:
        self.number = number
        self.owed = owed
        self.root = 0
        self.last = 0
        self.tokens: list[int] = []
        """The path's, and its nodes' numbers."""
        self.numbers: list[int] = []
        self.skipped: set[int] = set()
        # The root's distance from node 0.
        self._depth = 0
        # What tokens were sampled from, by number.
        self._laws: dict[int, SparseDistribution] = {}
        # The path's nodes' other children, by their parent's number and by token; and all that is in and below those, by number.
        self._sides: dict[int, dict[int, _Branch]] = {}
        self._branches: dict[int, _Branch] = {}

    @property
    def node_count(self) -> int:
        """Nodes below the root."""
        return len(self.tokens) + len(self._branches)

    @property
    def contradicted(self) -> bool:
        """Whether there are guesses, and others than what was committed."""
        return bool(self.owed and self.tokens)

    def add(self, proposal: Proposal, window: Window) -> Fate:
        parent, tokens, count = proposal.parent_node, proposal.token_ids, len(proposal.token_ids)
        self.check_known(parent, "proposal.parent_node")
        first = self.last + 1
        if proposal.first_node != first:
            raise _violation("proposal.first_node", f"must be {first}, the epoch's next node, not {proposal.first_node}")
        tip = self.numbers[-1] if self.numbers else self.root
        if parent == tip:
            self._check_room(count, self._depth + len(self.tokens), window)
            self.tokens += tokens
            self.numbers += range(first, first + count)
        elif self.knows(parent):
            self._branch_off(proposal, window)
        else:
            self.last += count  # the drafter has numbered them, so numbering goes on behind them
            return Fate.STALE
        self.last += count
        if proposal.distributions:
            self._laws.update(enumerate(proposal.distributions, first))
        return Fate.ADDED

    def _branch_off(self, proposal: Proposal, window: Window) -> None:
        """Add a run that does not lengthen the path."""
        parent, number, repeated = proposal.parent_node, proposal.first_node, proposal.token_ids[0]
        branch = self._branches.get(parent)
        if branch is not None:
            siblings, depth, taken = branch.children, branch.depth, repeated in branch.children
        else:
            at = 0 if parent == self.root else self.numbers.index(parent) + 1
            siblings, depth = self._sides.get(parent, {}), self._depth + at
            taken = repeated in siblings or repeated == self.tokens[at]
        self._check_room(len(proposal.token_ids), depth, window)
        if taken:
            raise _violation("proposal.token_ids", f"begin with {repeated}, but node {parent} has that child already")
        if branch is None:
            self._sides[parent] = siblings
        for i, token in enumerate(proposal.token_ids):
            siblings[token] = self._branches[number + i] = branch = _Branch(number + i, token, depth + 1 + i)
            siblings = branch.children

    def follow(self, token_ids: list[int]) -> tuple[int, bool]:
        """Move the root along committed tokens as far as there are nodes, the rest is owed; how far that was, and whether along
        first-proposed children alone.
        """
        owed, matched = self.owed, 0
        owed += token_ids
        for token, guess in zip(owed, self.tokens, strict=False):
            if token != guess:
                break
            matched += 1
        if matched:
            passed = [self.root, *self.numbers[: matched - 1]]
            self.root = self.numbers[matched - 1]
            self._depth += matched
            del self.tokens[:matched], self.numbers[:matched], owed[:matched]
            if self._sides or self._laws or self.skipped:
                self._forget(passed)
        branch = self._sides.get(self.root, {}).get(owed[0]) if owed and self._sides else None
        if branch is None:
            return matched, True
        return matched + self._leave_path(branch), False

    def _leave_path(self, branch: _Branch) -> int:
        """Move the root to a child beside the path and on from there; how far that was."""
        matched = 1
        while matched < len(self.owed) and self.owed[matched] in branch.children:
            branch = branch.children[self.owed[matched]]
            matched += 1
        del self.owed[:matched]
        self.root, self._depth = branch.number, branch.depth
        self.tokens, self.numbers, self._sides = [], [], {}
        while branch.children:
            favourite, *others = branch.children.values()
            if others:
                self._sides[branch.number] = {other.token: other for other in others}
            self.tokens.append(favourite.token)
            self.numbers.append(favourite.number)
            branch = favourite
        self._prune()
        return matched

    def _forget(self, passed: list[int]) -> None:
        """Forget nodes of the path that are no longer below the root, and what was beside them."""
        ruled_out = False
        for number in passed:
            self._laws.pop(number, None)
            self.skipped.discard(number)
            ruled_out = self._sides.pop(number, None) is not None or ruled_out
        if ruled_out:
            self._prune()

    def _prune(self) -> None:
        """Forget what is neither the root nor below it."""
        kept: dict[int, _Branch] = {}
        pending = [branch for side in self._sides.values() for branch in side.values()]
        while pending:
            branch = pending.pop()
            kept[branch.number] = branch
            pending += branch.children.values()
        self._branches = kept
        known = {self.root, *self.numbers, *kept}
        self.skipped &= known
        self._laws = {number: law for number, law in self._laws.items() if number in known}

    def laws(self, depth: int) -> list[SparseDistribution]:
        """What the path's first tokens were sampled from, of as many as were."""
        return [self._laws[number] for number in self.numbers[:depth] if number in self._laws] if self._laws else []

    def knows(self, node: int) -> bool:
        """Whether it is the root or below it."""
        return node == self.root or node in self._branches or node in self.numbers

    def check_known(self, node: int, field_name: str) -> None:
        if node > self.last:
            raise _violation(field_name, f"must be a node of the epoch, at most {self.last}, not {node}")

    def _check_room(self, count: int, parent_depth: int, window: Window) -> None:
        """For so many nodes below one of that depth."""
        depth = parent_depth - self._depth + count
        if depth > window.depth:
            raise _violation("proposal.token_ids", f"reach depth {depth}, but the window allows {window.depth}")
        if self.node_count + count > window.node_count:
            raise _violation("proposal.token_ids", f"make more than the {window.node_count} nodes that the window allows")


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
        return 0 if self._unheard else self._heard.root

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
        return 0 if heard.owed else heard.node_count

    def add(self, proposal: Proposal) -> Fate:
        """Hang a run of nodes under its parent.

        Raises OutriderError(PROTOCOL_VIOLATION) for what no delay can explain: an epoch or parent that never was, numbers that are
        not consecutive, two siblings of one token, more nodes or depth than the window allows.
        """
        epoch = self._hear(proposal.epoch, "proposal.epoch")
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
        epoch = self._hear(skip.epoch, "skip.epoch")
        if epoch is None:
            return Fate.STALE
        epoch.check_known(skip.node, "skip.node")
        if epoch.knows(skip.node):
            epoch.skipped.add(skip.node)
        return Fate.ADDED

    def _hear(self, number: int, field_name: str) -> _Epoch | None:
        """The epoch that a message is for, None if it is of no use; whoever is in it has read what ended those before."""
        if number > self.epoch:
            raise _violation(field_name, f"must be at most {self.epoch}, not {number}")
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
        """Node numbers of the path, in the epoch that it was proposed in; none while something is owed."""
        return [] if self._heard.owed else self._heard.numbers

    def path(self, depth: int) -> Path:
        """The path of first-proposed children from the root, cut at `depth` tokens; siblings come later, as less likely.

        Chosen by the trie's shape alone: a choice that looked at how likely a sampled token was would bias the output.
        """
        heard = self._heard
        if heard.owed:
            return Path([], [])
        tokens, distributions = heard.tokens[:depth], heard.laws(depth)
        # A path is sampled from end to end or counts as one-hot from end to end.
        return Path(tokens, distributions if len(distributions) == len(tokens) else [])

    def ready(self, depth: int) -> bool:
        """Whether waiting could not make the path to `depth` any longer."""
        heard = self._heard
        if heard.numbers and not heard.owed:
            return len(heard.numbers) >= depth or heard.numbers[-1] in heard.skipped
        # Who was asked anew may know more than when it skipped.
        return depth == 0 or (not self._unheard and heard.root in heard.skipped)

    def length(self, depth: int) -> int:
        """Tokens of the path, at most `depth`."""
        heard = self._heard
        length = 0 if heard.owed else len(heard.tokens)
        return length if length < depth else depth

    def advance(self, token_ids: list[int]) -> Walk:
        """Move the root along committed tokens. If the epoch lacks one of them, another begins."""
        heard = self._heard
        owed_before = bool(heard.owed)
        held = 0 if owed_before else heard.node_count
        matched, favoured = heard.follow(token_ids)
        left = 0 if heard.owed else heard.node_count
        hit = Hit.CHAIN if left and favoured else Hit.OUTCOME if left else Hit.LATE
        if heard.owed and not owed_before and heard.tokens:
            hit = Hit.MISS
        walk = Walk(matched, hit, self._dropped + held - matched - left)
        self._dropped = 0
        if self._unheard or heard.owed or (heard.last == 0 and token_ids):
            self._since += token_ids if self._unheard else ()
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
    return OutriderError(Reason.PROTOCOL_VIOLATION, f"{field_name} {message}", field_name)
