"""The target of a simulated verifier: a forward takes the time that a cost table says, and what is true decides on drafts.

Stands in for `outrider.lm.runner.ModelRunner` and for `verifier_svc.verification.batch.DraftVerifier`; no logits are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from bench.simulator.costs import Costs
from bench.simulator.events import Events
from bench.simulator.world import VOCAB, World
from outrider.errors import OutriderError
from outrider.lm.runner import SequenceSlice
from outrider.messages import AcceptanceRule
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.verification.acceptance import AcceptResult
from verifier_svc.verification.batch import Verified

_NO_LOGITS = torch.zeros(1, 1)


class SimulatedTarget:
    """Spends the time of forwards. Drafters on the target's own cores take theirs from it."""

    vocab_size = VOCAB
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, events: Events, costs: Costs, random: Random, noise: float) -> None:
        self._events = events
        self._costs = costs
        self._random = random
        self._noise = noise
        self.lost_s = 0.0
        """What forwards lost to drafters so far, in seconds."""
        self._ends_at = 0.0
        # Whether the forward in progress verifies drafts; and what forwards with and without drafts have still to pay.
        self._drafted = False
        self._lost_s = {True: 0.0, False: 0.0}

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Spend the time of a forward; what is returned has no meaning."""
        sequences = tokens = prompt_tokens = 0
        for part in slices:
            # Behind a prompt's last token one token is drawn; all tokens of a decoding sequence are judged.
            sequences += part.logit_count > 0
            tokens += part.logit_count
            prompt_tokens += len(part.token_ids) - part.logit_count
        self._events.spend(self._costs.plan_step_s + len(slices) * self._costs.plan_sequence_s)
        seconds = self._costs.forward_s(sequences, tokens, prompt_tokens)
        if self._noise > 0.0:
            seconds *= 1.0 + self._noise * (2.0 * self._random.random() - 1.0)
        self._drafted = tokens > sequences
        lost_s, self._lost_s[self._drafted] = min(self._lost_s[self._drafted], seconds), 0.0
        self.lost_s += lost_s
        self._events.spend(seconds + lost_s)
        self._ends_at = self._events.now
        return _NO_LOGITS

    def share_cores(self, seconds: float) -> None:
        """A drafter takes so much from the cores from now on; what overlaps with this forward is added to the next one of its kind.

        This one's end is an event already. The planner must see those steps get slower that do so on a real machine: plain ones,
        if drafters draft while these go on.
        """
        self._lost_s[self._drafted] += max(0.0, min(seconds, self._ends_at - self._events.now))


class SimulatedVerifier:
    """Lets the part of each draft stand that is true, and spends the host's time for the step."""

    thinking_ids: tuple[int, int] | None = None

    def __init__(self, events: Events, costs: Costs, world: World) -> None:
        self._events = events
        self._costs = costs
        self._world = world

    def verify(
        self, logits_RV: torch.Tensor, batch: Sequence[ScheduledSequence]
    ) -> list[Verified | OutriderError]:
        """As `DraftVerifier.verify`, without looking at the logits."""
        self._events.spend(self._costs.host_step_s + len(batch) * self._costs.host_sequence_s)
        return [self._verify(scheduled) if scheduled.samples else Verified() for scheduled in batch]

    def _verify(self, scheduled: ScheduledSequence) -> Verified:
        tokens, drafted = scheduled.sequence.tokens, scheduled.path.token_ids
        text = self._world.text_of(tokens, len(drafted) + 1)
        first = len(tokens) - text.prompt_length
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == text.tokens[first + accepted]:
            accepted += 1
        return Verified(
            AcceptResult(accepted, text.tokens[first + accepted]), AcceptanceRule.GREEDY
        )
