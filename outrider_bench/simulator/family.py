"""A drafter family for the simulator: its setting `acceptance` says how often a guess is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from drafter_svc.branching import Branch, offer_likeliest
from drafter_svc.families.base import Family
from outrider.drafter.draft_sequence import DraftSequence
from outrider_bench.simulator.costs import DraftingCost
from outrider_bench.simulator.events import Work
from outrider_bench.simulator.scenario import DrafterSpec
from outrider_bench.simulator.world import NO_GUESS, RIGHT, VOCAB, DrawnText, World


class SimulatedFamily(Family):
    """Drafts like a draft model: each pass drafts one token for every sequence and takes time."""

    def __init__(self, spec: DrafterSpec, world: World, cost: DraftingCost) -> None:
        self.name = spec.name
        self.acceptance = spec.acceptance
        self._hard_acceptance = spec.hard_acceptance
        self._skips_hard = spec.skips_hard
        self._alternatives = spec.alternatives
        self._world = world
        self._cost = cost
        self._slowness = spec.slowness
        # Maps a sequence to its number of unread tokens.
        self._unread: dict[int, int] = {}
        self._takes_time = any(cost.token_s.values())
        self.drafted_count = 0

    def opened(self, sequence: DraftSequence) -> None:
        """Read the prompt in the next round."""
        self._unread[sequence.id] = len(sequence.tokens)

    def committed(self, sequence: DraftSequence, num_valid_tokens: int) -> None:
        """Note the committed tokens that the drafter did not guess; the next round reads them."""
        self._unread[sequence.id] += max(0, len(sequence.tokens) - num_valid_tokens)

    def closed(self, sequence: DraftSequence) -> None:
        """Forget the sequence."""
        self._unread.pop(sequence.id, None)

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Draft up to each sequence's goal; the passes take the times of the cost table."""
        goals = [sequence.num_wanted for sequence in sequences]
        # The first pass reads the last token of each sequence.
        unread = sum([max(0, self._unread[sequence.id] - 1) for sequence in sequences])
        cost = self._cost
        lookups_s = len(sequences) * cost.sequence_s
        began_s = self._slowness * (cost.round_s + lookups_s + unread * cost.prompt_token_s)
        for sequence in sequences:
            self._unread[sequence.id] = 0
        passes = max(goals)
        if began_s > 0.0 or self._takes_time:
            ends = accumulate([self._pass_s(goals, i) for i in range(passes)], initial=began_s)
            passes = await Work([*ends][1:])
        for sequence, goal in zip(sequences, goals, strict=True):
            self._extend(sequence, min(goal, passes))

    def _pass_s(self, goals: list[int], number: int) -> float:
        """Return the seconds of pass `number`, which drafts for goals higher than `number`."""
        return self._slowness * self._cost.of_token(len([goal for goal in goals if goal > number]))

    def _extend(self, sequence: DraftSequence, count: int) -> None:
        """Add up to `count` guesses; all guesses after a wrong guess are wrong."""
        depth = len(sequence.guesses)
        text = self._world.text_of(sequence.tokens, depth + max(count, 1))
        first = len(sequence.tokens) - text.prompt_length
        count = self._offered(text, first + depth, count)
        if count == 0:
            return
        true = text.tokens[first : first + depth + count]
        right = sequence.guesses == true[:depth]
        known = depth
        while right and known < depth + count and self._knows(text, first + known, known):
            known += 1
        self.drafted_count += count
        run = [*true[depth:known], *[(token + 1) % VOCAB for token in true[known:]]]
        if not (sequence.wants_tree and self._alternatives):
            sequence.extend(run)
            return
        places = range(depth, depth + count)
        rates = [self._rate(text, first + place, place) for place in places]
        sequence.extend(run, confidences=rates)
        leaves = [
            leaf
            for place, rate in zip(places, rates, strict=True)
            for leaf in self._leaves(text, first, place, rate, right=right and place == known)
        ]
        offer_likeliest(sequence, leaves)

    def _leaves(
        self, text: DrawnText, first: int, place: int, rate: float, *, right: bool
    ) -> list[Branch]:
        """Return the alternatives to the guess at `place`, the likeliest first.

        One alternative may be right if the guess is the first wrong guess.
        """
        token = text.tokens[first + place]
        luck = self._world.luck(f"{self.name}/alternatives", text, first + place)
        left = 1.0
        leaves: list[Branch] = []
        for rank, share in enumerate(self._alternatives):
            hit = right and 1.0 - left <= luck < 1.0 - left * (1.0 - share)
            guess = token if hit else (token + 2 + rank) % VOCAB
            leaves.append(Branch(place, [guess], [(1.0 - rate) * left * share]))
            left *= 1.0 - share
        return leaves

    def _offered(self, text: DrawnText, index: int, count: int) -> int:
        """Return how many of the `count` guesses from `index` after the prompt on are offered."""
        recorded = text.guesses.get(self.name)
        if recorded is None:
            return 0 if self._skips_hard and text.hard[index] else count
        end = recorded.find(NO_GUESS, index, index + count)
        return count if end < 0 else end - index

    def _knows(self, text: DrawnText, index: int, depth: int) -> bool:
        recorded = text.guesses.get(self.name)
        if recorded is not None:
            return recorded[index : index + 1] == RIGHT
        return self._world.luck(self.name, text, index) < self._rate(text, index, depth)

    def _rate(self, text: DrawnText, index: int, depth: int) -> float:
        """Return the settings' acceptance at `depth`, for the token at `index` after the prompt."""
        by_kind = self.acceptance
        if self._hard_acceptance is not None and text.hard[index]:
            by_kind = self._hard_acceptance
        rates = by_kind.get(text.kind) or by_kind.get("") or [0.0]
        return rates[min(depth, len(rates) - 1)]
