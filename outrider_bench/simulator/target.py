"""The target of a simulated verifier.

Forwards take the time of a cost table, and the simulated world decides which guesses are right.

This module's classes replace `outrider.lm.runner.ModelRunner` and
`verifier_svc.verification.batch.DraftVerifier`, and compute no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from outrider.errors import OutriderError
from outrider.lm.runner import SequenceSlice
from outrider.protocol.messages import AcceptanceRule
from outrider.protocol.token_tree import depths
from outrider_bench.simulator.costs import Costs
from outrider_bench.simulator.events import Events
from outrider_bench.simulator.world import VOCAB, World
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.verification.batch import Verified, Verify
from verifier_svc.verification.draft import AcceptResult
from verifier_svc.verification.tree_walk import walk

_NO_LOGITS = torch.zeros(1, 1)


class SimulatedTarget:
    """Spends the time of forwards. Drafters on the target's own cores make forwards longer."""

    vocab_size = VOCAB
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, events: Events, costs: Costs, random: Random, noise: float) -> None:
        self._events = events
        self._costs = costs
        self._random = random
        self._noise = noise
        self.lost_s = 0.0
        """Seconds that forwards have lost to drafters."""
        self._ends_at = 0.0
        # `_drafted` says whether the forward in progress verifies drafts. `_lost_s` has the seconds
        # that the next forward with drafts (True) and the next without drafts (False) will lose.
        self._drafted = False
        self._lost_s = {True: 0.0, False: 0.0}

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Spend the time of a forward; the result has no meaning."""
        sequences = tokens = prompt_tokens = 0
        for part in slices:
            # Only the last token of a prompt has logits; all tokens of a decoding sequence do.
            sequences += part.logit_count > 0
            tokens += part.logit_count
            prompt_tokens += len(part.token_ids) - part.logit_count
        self._events.spend(self._costs.plan_step_s + len(slices) * self._costs.plan_sequence_s)
        seconds = self._costs.forward_s(sequences, tokens, prompt_tokens)
        if self._noise > 0.0:
            seconds *= 1.0 + self._noise * (2.0 * self._random.random() - 1.0)
        self._drafted = tokens > sequences
        lost_s = min(self._lost_s[self._drafted], seconds)
        self._lost_s[self._drafted] = 0.0
        self.lost_s += lost_s
        self._events.spend(seconds + lost_s)
        self._ends_at = self._events.now
        return _NO_LOGITS

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Do nothing: there is no cache, and a move is a small part of a forward."""

    def share_cores(self, seconds: float) -> None:
        """From now, let a drafter compute for `seconds` on the target's cores.

        The time that overlaps with the forward in progress makes the next forward of the same kind
        longer, because the end of this forward is already an event. Forwards with drafts and
        forwards without drafts lose time separately, so that the planner sees the same steps slow
        down as on a real machine.
        """
        left_s = self._ends_at - self._events.now
        self._lost_s[self._drafted] += max(0.0, min(seconds, left_s))


class SimulatedVerifier:
    """Accepts the part of a draft that agrees with its sequence's text; spends the host's time."""

    thinking_ids: tuple[int, int] | None = None

    def __init__(self, events: Events, costs: Costs, world: World) -> None:
        self._events = events
        self._costs = costs
        self._world = world

    def lay_out(self, batch: Sequence[ScheduledSequence]) -> Verify:
        """Like `DraftVerifier.lay_out`; the result ignores the logits."""
        return self._verify_all

    def _verify_all(
        self, logits_RV: torch.Tensor, batch: Sequence[ScheduledSequence]
    ) -> list[Verified | OutriderError]:
        costs = self._costs
        drafted = sum([len(scheduled.draft.token_ids) > 0 for scheduled in batch])
        host_s = costs.host_step_s + len(batch) * costs.host_sequence_s
        self._events.spend(host_s + drafted * costs.drafted_sequence_s)
        return [self._verify(scheduled) if scheduled.samples else Verified() for scheduled in batch]

    def _verify(self, scheduled: ScheduledSequence) -> Verified:
        tokens = scheduled.sequence.tokens
        draft = scheduled.draft
        drafted = draft.token_ids
        text = self._world.text_of(tokens, len(drafted) + 1)
        first = len(tokens) - text.prompt_length
        if draft.parents:
            own = [text.tokens[first + depth] for depth in (0, *depths(draft.parents))]
            path = walk(drafted, draft.parents, own)
            result = AcceptResult(len(path), text.tokens[first + len(path)], path)
            return Verified(result, AcceptanceRule.GREEDY)
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == text.tokens[first + accepted]:
            accepted += 1
        result = AcceptResult(accepted, text.tokens[first + accepted])
        return Verified(result, AcceptanceRule.GREEDY)
