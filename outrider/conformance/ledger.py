"""What was said on one draft stream, and whether a drafter's messages keep the contract. Knows no sockets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.v1 import drafts_pb2

_CLOSED_S = 0.5
_MAX_TOKENS, _MAX_ENTRIES = 1024, 4096
Complain = Callable[[str, str], None]
"""Takes a rule's name and what was wrong."""


@dataclass
class Followed:
    """One sequence as the verifier has it, and the guesses that stand."""

    opened: drafts_pb2.Opened
    committed: list[int]
    wanted: int
    closed_at: float = 0.0
    # Each guess with its base: a path of tokens behind so many committed ones.
    paths: list[tuple[int, list[int]]] = field(default_factory=list)
    answered: set[int] = field(default_factory=set)
    """Committed lengths that a proposal or skip named."""

    def standing(self) -> list[int]:
        """The longest guess that still agrees, behind the committed tokens."""
        best: list[int] = []
        for base, path in self.paths:
            text = [*self.committed[:base], *path]
            if text[: len(self.committed)] == self.committed:
                best = max(best, text[len(self.committed) :], key=len)
        return best


class Ledger:
    """The sequences of one stream. `said` and `heard` keep it up to date; `heard` complains."""

    def __init__(self, vocab_size: int, complain: Complain) -> None:
        self.sequences: dict[int, Followed] = {}
        self.fault_count = 0
        self._vocab_size = vocab_size
        self._told = complain

    def _complain(self, rule: str, reason: str) -> None:
        self.fault_count += 1
        self._told(rule, reason)

    def said(self, step: drafts_pb2.StepBatch) -> None:
        """The verifier says this."""
        for opened in step.opened:
            followed = Followed(opened, list(opened.token_ids), opened.draft_tokens)
            self.sequences[opened.sequence_id] = followed
        for verdict in step.verdicts:
            known = self.sequences[verdict.sequence_id]
            behind = len(known.committed) - (verdict.committed_length - len(verdict.new_token_ids))
            known.committed += verdict.new_token_ids[behind:]
            known.wanted = verdict.draft_tokens
        for closed in step.closed:
            self.sequences[closed.sequence_id].closed_at = time.monotonic()

    def heard(self, batch: drafts_pb2.DraftBatch) -> None:
        """The drafter says this."""
        if len(batch.proposals) + len(batch.skips) > _MAX_ENTRIES:
            self._complain("valid-tokens", f"a message has more than {_MAX_ENTRIES} entries")
        for proposal in batch.proposals:
            if known := self._known(proposal.sequence_id, proposal.base_length):
                self._take(known, proposal)
        for skip in batch.skips:
            if known := self._known(skip.sequence_id, skip.base_length):
                known.answered.add(skip.base_length)

    def _known(self, sequence_id: int, base_length: int) -> Followed | None:
        known = self.sequences.get(sequence_id)
        if known is None:
            self._complain("knows-its-sequences", f"{sequence_id} was never opened on this stream")
            return None
        if known.closed_at and time.monotonic() > known.closed_at + _CLOSED_S:
            self._complain("knows-its-sequences", f"{sequence_id} was closed")
            return None
        first, last = len(known.opened.token_ids), len(known.committed)
        if not first <= base_length <= last:
            text = f"base_length must be in [{first}, {last}], not {base_length}"
            self._complain("valid-base", text)
            # Wrong, but an answer.
            known.answered.add(last)
            return None
        return known

    def _take(self, known: Followed, proposal: drafts_pb2.Proposal) -> None:
        known.answered.add(proposal.base_length)
        tokens, parents = list(proposal.token_ids), list(proposal.parents)
        if not 1 <= len(tokens) <= _MAX_TOKENS:
            self._complain("valid-tokens", f"a proposal has {len(tokens)} tokens")
            return
        if max(tokens) >= self._vocab_size:
            text = f"token {max(tokens)} is not below vocab_size, {self._vocab_size}"
            self._complain("valid-tokens", text)
            return
        places = parents or list(range(len(tokens)))
        if len(places) != len(tokens) or any(at > i for i, at in enumerate(places)):
            self._complain("valid-parents", f"parents {parents} of {len(tokens)} tokens")
            return
        self._check_distributions(known, proposal)
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens, places, strict=True):
            paths.append([*paths[parent], token])
        known.paths += [(proposal.base_length, path) for path in paths[1:]]

    def _check_distributions(self, known: Followed, proposal: drafts_pb2.Proposal) -> None:
        count, given = len(proposal.token_ids), list(proposal.distributions)
        if known.opened.distribution != drafts_pb2.DRAFT_DISTRIBUTION_SPARSE:
            if any(one.token_ids for one in given):
                self._complain("valid-distributions", "distributions where none were asked for")
            return
        if len(given) not in (0, count):
            self._complain("valid-distributions", f"{len(given)} of them for {count} tokens")
        for token, one in zip(proposal.token_ids, given, strict=False):
            weights = dict(zip(one.token_ids, one.probabilities, strict=False))
            if weights and (abs(sum(weights.values()) - 1) > 1e-3 or not weights.get(token)):
                text = f"the distribution of {token} does not sum to 1, or gives it nothing"
                self._complain("valid-distributions", text)
