"""vLLM's own drafter (EAGLE-3, MTP, DFlash, a draft model) as one of our drafters.

vLLM's runner calls its drafter after every forward. The drafter's guesses are a draft like all
other drafts. They stand beside the drafts of n-grams, suffixes, grammars and drafters on other
machines, and the plan chooses among all of these. The drafter's time is part of each step's time,
whether its draft is verified or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from outrider.protocol.draft_messages import DraftBatch, Hello, Proposal, Skip
from verifier_svc.vllm.hub import DraftHub

NAME = "vllm"
"""The id of vLLM's own drafter, as requests and metrics name it."""


class OwnDrafter:
    """vLLM's own drafter in a hub; the caller holds the hub's `turn`."""

    def __init__(self, hub: DraftHub, method: str, draft_tokens: int) -> None:
        """The drafter's family is named after `method`, vLLM's name for the drafter.

        The drafter drafts at most `draft_tokens`.
        """
        self._hub = hub
        hello = Hello(NAME, f"vllm-{method}", "", draft_tokens)
        # vLLM tells its drafter of commits, so our messages to it are for nobody.
        self._drafter = hub.drafting.join(hello, _read_nothing, is_local=True)

    def take(self, guesses: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Take the guesses for requests, each after all tokens that the request has now.

        Guesses that the plan did not ask for are dropped. An id that is not in the vocabulary is
        dropped too, with the guesses after it: vLLM puts -1 where it has no guess.
        """
        vocab_size = self._hub.limits.vocab_size
        batch = DraftBatch()
        for request_id, tokens in guesses:
            sequence = self._hub.sequence_of(request_id)
            assignment = None if sequence is None else sequence.assignments.get(NAME)
            if sequence is None or assignment is None or not assignment.opened:
                continue
            length = len(sequence.tokens)
            if assignment.sent_length != length:
                continue
            known = list(takewhile(lambda token: 0 <= token < vocab_size, tokens))
            if known:
                batch.proposals.append(Proposal(sequence.id, length, known))
            if len(known) < self._drafter.hello.max_draft_tokens:
                # Without a skip, a step could wait for further guesses.
                batch.skips.append(Skip(sequence.id, length))
        if batch.proposals or batch.skips:
            self._hub.drafting.on_drafts(self._drafter, batch)


def _read_nothing(_: object) -> None:
    """Do nothing."""
