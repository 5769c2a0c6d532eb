"""One sequence as a drafter sees it: the committed tokens, and the chain of guesses that runs ahead of them.

Shared by all families that draft chains. Knows tokens and node numbers; not models, pools or streams.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import OutriderError, Reason
from outrider.messages import Opened, Proposal, Skip, SparseDistribution, Verdict


class Chain:
    """`tokens` are committed, `ahead` is guessed below them; nodes of a chain are numbered without gaps from the root on."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.tokens = list(opened.token_ids)
        self.ahead: list[int] = []
        self.window = opened.window
        self.depth = opened.depth
        self.epoch = opened.epoch
        self._distributions: list[SparseDistribution] = []
        self._root = 0
        self._unsent = False
        self._skipped: tuple[int, int] | None = None

    @property
    def tip(self) -> int:
        """Number of the deepest node."""
        return self._root + len(self.ahead)

    @property
    def room(self) -> int:
        """How many more nodes the window allows; 0 once the rest was skipped."""
        if self._skipped == (self.epoch, self.tip):
            return 0
        return max(0, min(self.window.depth, self.window.node_count) - len(self.ahead))

    @property
    def urgent(self) -> bool:
        """Whether the verifier has less ahead than it takes in one step, so that it may be waiting."""
        return self.room > 0 and len(self.ahead) < self.depth

    def apply(self, verdict: Verdict) -> int:
        """Follow the commit; how many of the tokens held before (`tokens`, then `ahead`) still stand, for state that was kept.

        A raised epoch means that the verifier's trie lacked what was committed. That may be because the guesses were wrong, or
        because they came too late: then those behind the commit still stand, and `resend` offers them in the new epoch.
        Raises OutriderError(PROTOCOL_VIOLATION) for a verdict that does not fit what was proposed.
        """
        new, held = verdict.new_token_ids, len(self.tokens) + len(self.ahead)
        matched = next((i for i, (a, b) in enumerate(zip(new, self.ahead, strict=False)) if a != b), min(len(new), len(self.ahead)))
        raised = verdict.epoch != self.epoch
        if not raised and matched < len(new):
            raise OutriderError(Reason.PROTOCOL_VIOLATION, "a verdict of the same epoch commits what was not proposed")
        if matched < len(new):
            held = len(self.tokens) + matched
            self.ahead, self._distributions = [], []
        else:
            self.ahead, self._distributions = self.ahead[len(new) :], self._distributions[len(new) :]
        self.tokens += new
        self.epoch, self._root = verdict.epoch, verdict.root_node
        self._unsent = raised and bool(self.ahead)
        self.window = verdict.window or self.window
        self.depth = self.depth if verdict.depth is None else verdict.depth
        if len(self.tokens) != verdict.committed_length:
            raise OutriderError(
                Reason.PROTOCOL_VIOLATION, f"{verdict.committed_length} tokens are committed, not {len(self.tokens)}"
            )
        return held

    def resend(self) -> Proposal | None:
        """The guesses that outlived a raised epoch, proposed in the new one; None when there are none."""
        if not self._unsent:
            return None
        self._unsent = False
        return Proposal(self.opened.sequence_id, self.epoch, 0, 1, list(self.ahead), list(self._distributions))

    def grow(self, token_ids: list[int], distributions: Sequence[SparseDistribution] = (), draft_seconds: float = 0.0) -> Proposal:
        """Hang a run under the tip."""
        parent = self.tip
        self.ahead += token_ids
        self._distributions += distributions
        return Proposal(self.opened.sequence_id, self.epoch, parent, parent + 1, token_ids, list(distributions), draft_seconds)

    def skip(self) -> Skip:
        """Give up below the tip until the next verdict that moves it or raises the epoch."""
        self._skipped = (self.epoch, self.tip)
        return Skip(self.opened.sequence_id, self.epoch, self.tip)
