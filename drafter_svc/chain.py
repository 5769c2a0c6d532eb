"""One sequence as a drafter sees it: the committed tokens, the chain of guesses that runs ahead of them, and side branches for
what may be committed instead.

Shared by all families. Knows tokens and node numbers; not models, pools or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import OutriderError, Reason
from outrider.messages import Opened, Proposal, Skip, SparseDistribution, Verdict

_DECAY = 0.9


@dataclass(slots=True)
class _Run:
    """Guesses one below the other, with their node numbers and what each was sampled from (None when one-hot)."""

    tokens: list[int]
    nodes: list[int]
    distributions: list[SparseDistribution | None]

    def behind(self, count: int) -> _Run:
        return _Run(self.tokens[count:], self.nodes[count:], self.distributions[count:])


class Chain:
    """`tokens` are committed, `ahead` is guessed below them. A branch hangs beside the chain: below the root and `at` tokens of
    `ahead`, it begins with another token than the chain's next.
    """

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.tokens = list(opened.token_ids)
        self.window = opened.window
        self.depth = opened.depth
        self.epoch = opened.epoch
        self._main = _Run([], [], [])
        self._branches: dict[tuple[int, int], _Run] = {}
        self._root = 0
        self._last = 0
        self._unsent = False
        self._skipped: tuple[int, int] | None = None
        self._hits, self._misses = 0.0, 0.0

    @property
    def ahead(self) -> list[int]:
        return self._main.tokens

    @property
    def tip(self) -> int:
        """Number of the chain's deepest node."""
        return self._main.nodes[-1] if self._main.nodes else self._root

    @property
    def side_room(self) -> int:
        """How many more nodes the window allows in branches."""
        return max(0, self.window.node_count - len(self.ahead) - sum(len(run.tokens) for run in self._branches.values()))

    @property
    def room(self) -> int:
        """By how many more nodes the chain may grow; 0 once the rest was skipped."""
        if self._skipped == (self.epoch, self.tip):
            return 0
        return max(0, min(self.window.depth - len(self.ahead), self.side_room))

    @property
    def urgent(self) -> bool:
        """Whether the verifier has less ahead than it takes in one step, so that it may be waiting."""
        return self.room > 0 and len(self.ahead) < self.depth

    @property
    def acceptance(self) -> float:
        """Probability that a guess is committed, given those before it, from what verdicts said so far."""
        return (self._hits + 2.0) / (self._hits + self._misses + 3.0)

    def apply(self, verdict: Verdict) -> int:
        """Follow the commit; how many of the tokens held before (`tokens`, then `ahead`) still stand, for state that was kept.

        A raised epoch means that the verifier's trie lacked what was committed. That may be because the guesses were wrong, or
        because they came too late: then those behind the commit still stand, and `resend` offers them in the new epoch.
        Raises OutriderError(PROTOCOL_VIOLATION) for a verdict that does not fit what was proposed.
        """
        new, held = verdict.new_token_ids, len(self.tokens) + len(self.ahead)
        matched = next((i for i, (a, b) in enumerate(zip(new, self.ahead, strict=False)) if a != b), min(len(new), len(self.ahead)))
        raised = verdict.epoch != self.epoch
        self._hits = self._hits * _DECAY + matched
        self._misses = self._misses * _DECAY + (matched < len(new) and matched < len(self.ahead))
        if matched == len(new):
            self._main = self._main.behind(matched)
            self._branches = {(at - matched, token): run for (at, token), run in self._branches.items() if at >= matched}
        else:
            held = len(self.tokens) + matched
            self._main = self._outcome(matched, new[matched:], raised)
            self._branches = {}
        self.tokens += new
        self.epoch, self._root = verdict.epoch, verdict.root_node
        self.window = verdict.window or self.window
        self.depth = self.depth if verdict.depth is None else verdict.depth
        if raised:
            self._branches, self._last = {}, len(self.ahead)
            self._main.nodes = list(range(1, self._last + 1))
        self._unsent = raised and bool(self.ahead)
        if len(self.tokens) != verdict.committed_length:
            raise OutriderError(
                Reason.PROTOCOL_VIOLATION, f"{verdict.committed_length} tokens are committed, not {len(self.tokens)}"
            )
        return held

    def _outcome(self, at: int, tokens: list[int], raised: bool) -> _Run:
        """What was guessed behind `tokens`, which were committed beside the chain; empty when that was not foreseen."""
        branch = self._branches.get((at, tokens[0]))
        if branch is not None and branch.tokens[: len(tokens)] == tokens:
            return branch.behind(len(tokens))
        if not raised:
            raise OutriderError(Reason.PROTOCOL_VIOLATION, "a verdict of the same epoch commits what was not proposed")
        return _Run([], [], [])

    def resend(self) -> Proposal | None:
        """The guesses that outlived a raised epoch, proposed in the new one; None when there are none."""
        if not self._unsent:
            return None
        self._unsent = False
        known = [distribution for distribution in self._main.distributions if distribution is not None]
        # Behind an outcome, which is one-hot, a run may have been sampled; together they count as one-hot.
        distributions = known if len(known) == len(self.ahead) else []
        return Proposal(self.opened.sequence_id, self.epoch, 0, 1, list(self.ahead), distributions)

    def grow(self, token_ids: list[int], distributions: Sequence[SparseDistribution] = (), draft_seconds: float = 0.0) -> Proposal:
        """Hang a run under the tip."""
        parent = self.tip
        run = self._number(token_ids, distributions)
        self._main.tokens += run.tokens
        self._main.nodes += run.nodes
        self._main.distributions += run.distributions
        return Proposal(self.opened.sequence_id, self.epoch, parent, run.nodes[0], token_ids, list(distributions), draft_seconds)

    def branches_at(self, at: int) -> set[int]:
        """The tokens that are guessed below the root and `at` tokens of `ahead`, which goes further than that."""
        return {self.ahead[at], *(token for place, token in self._branches if place == at)}

    def branch(self, at: int, token_ids: list[int], draft_seconds: float = 0.0) -> Proposal:
        """Hang a run beside the chain, below `at` tokens of `ahead`; its first token must not be among `branches_at(at)`."""
        parent = self._main.nodes[at - 1] if at else self._root
        run = self._branches[at, token_ids[0]] = self._number(token_ids)
        return Proposal(self.opened.sequence_id, self.epoch, parent, run.nodes[0], token_ids, [], draft_seconds)

    def _number(self, token_ids: list[int], distributions: Sequence[SparseDistribution] = ()) -> _Run:
        first = self._last + 1
        self._last += len(token_ids)
        return _Run(list(token_ids), list(range(first, first + len(token_ids))), list(distributions) or [None] * len(token_ids))

    def skip(self) -> Skip:
        """Give up below the tip until the next verdict that moves it or raises the epoch."""
        self._skipped = (self.epoch, self.tip)
        return Skip(self.opened.sequence_id, self.epoch, self.tip)
