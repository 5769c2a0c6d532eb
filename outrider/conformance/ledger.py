"""Records one draft stream and checks a drafter's messages against the contract.

This module uses no sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.protocol.limits import (
    MAX_BATCH_ENTRIES,
    MAX_BATCH_TOKENS,
    MAX_PROPOSAL_TOKENS,
    SUM_TOLERANCE,
)
from outrider.v1 import drafts_pb2

# For this long after the verifier has closed a sequence, messages for the sequence are no fault.
_CLOSED_S = 0.5
Complain = Callable[[str, str], None]
"""Takes the name of a broken rule, or of a note, and the reason."""


@dataclass
class TrackedSequence:
    """One sequence: the verifier's committed tokens, and the drafter's guesses."""

    opened: drafts_pb2.Opened
    committed: list[int]
    draft_tokens: int
    window: drafts_pb2.Window
    """The largest window that the sequence has had."""
    opened_at: float = field(default_factory=time.monotonic)
    closed_at: float = 0.0
    # Each path of guesses, with the number of committed tokens before the path.
    paths: list[tuple[int, list[int]]] = field(default_factory=list)
    answered: set[int] = field(default_factory=set)
    """Committed lengths that a proposal or skip has answered."""
    skipped: set[int] = field(default_factory=set)
    """Committed lengths that a skip has answered."""
    trees: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    """Base length, tokens and parents of each proposal with parents."""

    def valid_guess(self) -> list[int]:
        """Return the guesses after the committed tokens, from the longest path that fits these."""
        best: list[int] = []
        for base, path in self.paths:
            text = [*self.committed[:base], *path]
            if text[: len(self.committed)] == self.committed:
                best = max(best, text[len(self.committed) :], key=len)
        return best

    @property
    def is_answered(self) -> bool:
        """True if the drafter answered the committed length, or has enough guesses for a step."""
        return self.has_enough or len(self.committed) in self.answered

    @property
    def is_settled(self) -> bool:
        """True if a verifier need not wait: there are enough guesses for a step, or a skip."""
        return self.has_enough or len(self.committed) in self.skipped

    @property
    def has_enough(self) -> bool:
        """True if a path has as many valid guesses as the next step can use."""
        return len(self.valid_guess()) >= self.draft_tokens


class Ledger:
    """The sequences of one stream.

    `received` reports broken rules to `complain`, and allowed but useless behaviour to `remark`.
    """

    def __init__(self, vocab_size: int, complain: Complain, remark: Complain) -> None:
        self.sequences: dict[int, TrackedSequence] = {}
        self.fault_count = 0
        self._vocab_size = vocab_size
        self._report = complain
        self._remark = remark

    def _complain(self, rule: str, reason: str) -> None:
        self.fault_count += 1
        self._report(rule, reason)

    def sent(self, step: drafts_pb2.StepBatch) -> None:
        """Record a message of the verifier."""
        for opened in step.opened:
            tokens = list(opened.token_ids)
            sequence = TrackedSequence(opened, tokens, opened.draft_tokens, opened.window)
            self.sequences[opened.sequence_id] = sequence
        for verdict in step.verdicts:
            known = self.sequences[verdict.sequence_id]
            known_count = len(known.committed) + len(verdict.new_token_ids)
            known_count -= verdict.committed_length
            known.committed += verdict.new_token_ids[known_count:]
            known.draft_tokens = verdict.draft_tokens
            if verdict.window.token_count > known.window.token_count:
                known.window = verdict.window
        for closed in step.closed:
            self.sequences[closed.sequence_id].closed_at = time.monotonic()

    def received(self, batch: drafts_pb2.DraftBatch) -> None:
        """Record a message of the drafter and check it."""
        if len(batch.proposals) + len(batch.skips) > MAX_BATCH_ENTRIES:
            self._complain("valid-tokens", f"a message has more than {MAX_BATCH_ENTRIES} entries")
        if sum(len(proposal.token_ids) for proposal in batch.proposals) > MAX_BATCH_TOKENS:
            self._complain("valid-tokens", f"a message has more than {MAX_BATCH_TOKENS} tokens")
        for proposal in batch.proposals:
            known = self._known(proposal.sequence_id, proposal.base_length)
            if known is not None:
                self._take(known, proposal)
        for skip in batch.skips:
            known = self._known(skip.sequence_id, skip.base_length)
            if known is not None:
                known.answered.add(skip.base_length)
                known.skipped.add(skip.base_length)

    def _known(self, sequence_id: int, base_length: int) -> TrackedSequence | None:
        """Return the sequence of a proposal or skip.

        Complain and return None if the sequence is not open or the base is wrong.
        """
        known = self.sequences.get(sequence_id)
        if known is None:
            self._complain("knows-its-sequences", f"{sequence_id} was never opened on this stream")
            return None
        if known.closed_at and time.monotonic() > known.closed_at + _CLOSED_S:
            self._complain("knows-its-sequences", f"{sequence_id} was closed")
            return None
        first = len(known.opened.token_ids)
        last = len(known.committed)
        if not first <= base_length <= last:
            text = f"base_length must be in [{first}, {last}], not {base_length}"
            self._complain("valid-base", text)
            # A wrong base still answers the verdict, so that only one rule counts as broken.
            known.answered.add(last)
            return None
        return known

    def _take(self, known: TrackedSequence, proposal: drafts_pb2.Proposal) -> None:
        known.answered.add(proposal.base_length)
        tokens = list(proposal.token_ids)
        parents = list(proposal.parents)
        if not 1 <= len(tokens) <= MAX_PROPOSAL_TOKENS:
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
        given = list(proposal.confidences)
        if len(given) not in (0, len(tokens)) or not all(0 < value <= 1 for value in given):
            self._complain("valid-confidences", f"confidences {given} of {len(tokens)} tokens")
        self._check_distributions(known, proposal)
        self._check_duration(known, proposal)
        if parents:
            known.trees.append((proposal.base_length, tokens, parents))
        if len(tokens) > 2 * known.window.token_count:
            text = f"{len(tokens)} tokens, where the window takes {known.window.token_count}"
            self._remark("beyond-the-window", text)
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens, places, strict=True):
            paths.append([*paths[parent], token])
        known.paths += [(proposal.base_length, path) for path in paths[1:]]

    def _check_duration(self, known: TrackedSequence, proposal: drafts_pb2.Proposal) -> None:
        seconds = proposal.draft_duration.seconds + proposal.draft_duration.nanos * 1e-9
        if seconds < 0:
            self._complain("valid-durations", f"draft_duration is {seconds} s")
        known_s = time.monotonic() - known.opened_at
        if seconds > known_s:
            text = f"{seconds:.3g} s of drafting, {known_s:.3g} s after the sequence was opened"
            self._remark("implausible-durations", text)

    def _check_distributions(self, known: TrackedSequence, proposal: drafts_pb2.Proposal) -> None:
        count = len(proposal.token_ids)
        given = list(proposal.distributions)
        if known.opened.distribution != drafts_pb2.DRAFT_DISTRIBUTION_SPARSE:
            if any(guess.token_ids for guess in given):
                self._complain("valid-distributions", "distributions without a request for them")
            return
        if len(given) not in (0, count):
            text = f"{len(given)} distributions for {count} tokens"
            self._complain("valid-distributions", text)
        for token, one in zip(proposal.token_ids, given, strict=False):
            weights = dict(zip(one.token_ids, one.probabilities, strict=False))
            is_normal = abs(sum(weights.values()) - 1) <= SUM_TOLERANCE
            if weights and not (is_normal and weights.get(token)):
                text = f"the distribution of {token} does not sum to 1, or gives it probability 0"
                self._complain("valid-distributions", text)
