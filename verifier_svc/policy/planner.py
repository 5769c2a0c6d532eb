"""Decides how many tokens each sequence drafts, which drafters are asked, and how long to wait for whom: all for goodput.

Reads sequences and measured numbers and writes nothing. It looks at no token, so it cannot bias the output.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import itemgetter
from typing import NamedTuple

from outrider.draft_tokens_policy import DraftTokensPolicy
from verifier_svc.policy.forward_cost import ForwardCost
from verifier_svc.policy.goodput import goodput, max_wait_s, price_of_tokens, steps_meanwhile
from verifier_svc.policy.plan import Plan, pending_draft
from verifier_svc.policy.speculation_budget import SpeculationBudget
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.sequence import Assignment, Sequence

# Drafters are compared by how soon a draft of so many tokens is there.
_COMPARED_TOKENS = 4
# Least cost of a draft token, in plain steps of one sequence. On a large model the measured cost of a
# few tokens can be 0.
_LEAST_PRICE = 0.005
# How much faster than plain steps drafts must make the batch: for less no drafter should work.
_MARGIN = 1.01
# For a draft that is waited for whether it pays or not: its drafter may be gone without a word.
_LONGEST_WAIT_S = 1.0


class _Prices(NamedTuple):
    """Costs of forwards of the present batch."""

    batch: int
    decode_step_s: float
    rate: float
    """Tokens a second that the batch commits, by the last plan's speedup; 0 before anything was measured."""
    token_prices: list[tuple[int, float]]
    """Up to how many draft tokens cost how much each, in tokens."""
    limit: int
    """Most draft tokens of a sequence."""


class _Choice(NamedTuple):
    """Drafts of so many tokens, at this price, by some drafters; and what comes of them."""

    drafts: list[tuple[Sequence, Assignment, int]]
    drafters: frozenset[Drafter]
    price: float
    rate: float = 0.0
    """Tokens a second."""
    waits: bool = True
    """Whether each forward waits for the drafts. If not, steps go on meanwhile."""


class Planner:
    """Plans for one engine. With `always` every draft is asked for and waited for, whether it pays or not."""

    def __init__(
        self,
        policy: DraftTokensPolicy,
        cost: ForwardCost,
        budget: SpeculationBudget,
        *,
        always: bool = False,
    ) -> None:
        self._policy = policy
        self._cost = cost
        self.budget = budget
        self._always = always
        # Whether drafts have the policy's most tokens, whatever that brings.
        self._by_limit = policy.kind != "goodput" or always

    def plan(self, running: Collection[Sequence], last: Plan, step: int, now_s: float) -> Plan:
        """The plan of step number `step`, at `now_s` by the clock; `last` is the plan before it."""
        decoding: list[Sequence] = []
        reading: list[Sequence] = []
        for sequence in running:
            (decoding if sequence.num_uncomputed_tokens == 1 else reading).append(sequence)
        batch, drafters, newcomers = (
            len(decoding) or last.batch,
            _drafters(decoding),
            _drafters(reading),
        )
        if not drafters and not newcomers:
            decode_step_s = self._cost.estimate(batch, batch)
            return Plan(
                batch,
                decode_step_s,
                price=last.price,
                paying=last.paying,
                considered=last.considered,
                silent=last.silent,
            )
        if self.budget.needs_quiet(batch) and not self._always:
            return self._quiet(batch, running, last)
        prices = self._prices(batch, last, beside_prompts=bool(reading))
        choice, considered = _Choice([], last.paying, last.price), last.considered
        if drafters:
            choice, considered = self._choose(decoding, drafters, prices), drafters
        drafts = choice.drafts
        silent = self._silent(batch, choice.drafters, considered)
        if newcomers:
            # A draft may stand behind a prompt's last token. Drafters that nothing is known of are believed to pay.
            believed = choice._replace(drafters=choice.drafters | (newcomers - considered))
            drafts = drafts + [
                draft for sequence in reading for draft in self._pick(sequence, believed, prices)
            ]
        draft_tokens: dict[int, int] = {}
        asks: dict[Assignment, int] = {}
        for sequence, assignment, count in drafts:
            draft_tokens[sequence.id] = min(
                max(count, draft_tokens.get(sequence.id, 0)), sequence.most_draft_tokens
            )
            # The tokens that are committed until the draft is there count as its first.
            further = (
                0
                if choice.waits
                else steps_meanwhile(assignment.drafter.latency(count), prices.decode_step_s)
            )
            asks[assignment] = min(count + further, assignment.trie.window.depth)
        rate = choice.rate or prices.rate
        wait_for, wait_s = self._waits(decoding, draft_tokens, prices._replace(rate=rate), now_s)
        return Plan(
            batch=prices.batch,
            decode_step_s=prices.decode_step_s,
            speedup=max(rate * prices.decode_step_s / prices.batch, 1.0),
            price=choice.price,
            planned_ids=frozenset([sequence.id for sequence in (*decoding, *reading)]),
            draft_tokens=draft_tokens,
            asks=asks,
            probes=_due_probes(decoding, asks, silent, step),
            wait_for=wait_for,
            wait_s=wait_s,
            always=self._always,
            paying=choice.drafters,
            considered=considered,
            silent=silent,
        )

    def _quiet(self, batch: int, running: Collection[Sequence], last: Plan) -> Plan:
        """A plan to ask nobody, for quiet steps to be measured; what is believed of drafters stays."""
        decode_step_s, ids = (
            self._cost.estimate(batch, batch),
            frozenset([sequence.id for sequence in running]),
        )
        return Plan(
            batch,
            decode_step_s,
            price=last.price,
            planned_ids=ids,
            paying=last.paying,
            considered=last.considered,
            silent=last.silent,
        )

    def _silent(
        self, batch: int, paying: frozenset[Drafter], known: frozenset[Drafter]
    ) -> frozenset[Drafter]:
        """The drafters that are not even probed: probes lost too much, or drafting with them did."""
        if self._always:
            return frozenset()
        if not self.budget.allows(batch, paying):
            return known - paying
        return frozenset([d for d in known - paying if not self.budget.allows(batch, paying | {d})])

    def first_draft_tokens(self, sequence: Sequence, assignment: Assignment, last: Plan) -> int:
        """Draft tokens to ask for with a new sequence; 0 if the last plan says that the drafter does not pay."""
        drafter = assignment.drafter
        if drafter in last.considered and drafter not in last.paying:
            return 0
        return self._worth(
            sequence, assignment, last.price, self._prices(last.batch, last, beside_prompts=False)
        )

    def _prices(self, batch: int, last: Plan, *, beside_prompts: bool) -> _Prices:
        cost = self._cost
        decode_step_s = cost.estimate(batch, batch)
        rate = last.speedup * batch / decode_step_s if decode_step_s > 0.0 else 0.0
        # With a prompt's tokens the forward takes time by each, where those of a few sequences may come almost free. The prompt's
        # own time is no part of what a committed token is worth: it has to be spent either way.
        least_s = max(
            _LEAST_PRICE * decode_step_s / batch, cost.prompt_token_s if beside_prompts else 0.0
        )
        further = cost.further_tokens_s(batch) or [(1, 0.0)]
        token_prices = [(count, rate * max(seconds, least_s)) for count, seconds in further]
        return _Prices(batch, decode_step_s, rate, token_prices, self._policy.limit(batch))

    # --- who drafts how much ---

    def _choose(
        self, decoding: list[Sequence], drafters: frozenset[Drafter], prices: _Prices
    ) -> _Choice:
        """The set of drafters with which steps commit the most for their time, waits included.

        Tries the quickest drafter alone, then the two quickest, and so on. The set is empty if none
        beats plain steps by the margin.
        """
        if self._always or prices.decode_step_s == 0.0:
            return self._with(decoding, drafters, prices)
        asked: frozenset[Drafter] = frozenset()
        plain_rate = prices.batch / prices.decode_step_s
        best, least = (
            _Choice([], asked, prices.token_prices[0][1], plain_rate),
            _MARGIN * plain_rate,
        )
        for drafter in sorted(
            drafters, key=lambda drafter: (drafter.latency(_COMPARED_TOKENS), drafter.id)
        ):
            asked |= {drafter}
            if not self.budget.allows(prices.batch, asked):
                continue
            choice = self._with(decoding, asked, prices)
            if choice.rate > least:
                best, least = choice, choice.rate
        return best

    def _with(
        self, decoding: list[Sequence], drafters: frozenset[Drafter], prices: _Prices
    ) -> _Choice:
        """The drafts that are worth their places in a forward if these drafters draft."""
        chances: list[float] = []
        for sequence in decoding:
            found = [
                self._chances(sequence, a, prices)
                for a in sequence.assignments.values()
                if a.drafter in drafters
            ]
            if found:
                # Of several that of which the first token is the likeliest.
                chances += max(found)
        chances.sort()
        choice = _Choice([], drafters, price_of_tokens(chances, prices.token_prices))
        drafts = [draft for sequence in decoding for draft in self._pick(sequence, choice, prices)]
        rate, waits = self._goodput(drafts, prices)
        return choice._replace(drafts=drafts, rate=rate, waits=waits or self._always)

    def _chances(self, sequence: Sequence, assignment: Assignment, prices: _Prices) -> list[float]:
        """How likely each token that could be drafted is to be committed; 1 for those that are drafted whatever they cost."""
        fixed, most = (
            sequence.request.speculation.draft_tokens,
            assignment.drafter.hello.max_draft_tokens,
        )
        if fixed is not None:
            return [1.0] * min(fixed, most)
        return assignment.rate.survival[: min(prices.limit, most)]

    def _pick(
        self, sequence: Sequence, choice: _Choice, prices: _Prices
    ) -> list[tuple[Sequence, Assignment, int]]:
        """The draft that brings the most for its places in the forward, if any is worth them; all of them with `always`."""
        found: list[tuple[float, Assignment, int]] = []
        for assignment in sequence.assignments.values():
            if assignment.drafter in choice.drafters:
                count = self._worth(sequence, assignment, choice.price, prices)
                gain = assignment.rate.expected_tokens(count) - 1.0 - count * choice.price
                if count > 0 and (gain > -1e-9 or self._always):
                    found.append((gain, assignment, count))
        if not self._always and len(found) > 1:
            found = [max(found, key=itemgetter(0))]
        return [(sequence, assignment, count) for _, assignment, count in found]

    def _worth(
        self, sequence: Sequence, assignment: Assignment, price: float, prices: _Prices
    ) -> int:
        """Draft tokens of this drafter that are worth their place in a step."""
        fixed, most = (
            sequence.request.speculation.draft_tokens,
            assignment.drafter.hello.max_draft_tokens,
        )
        if fixed is not None or self._by_limit:
            return min(prices.limit if fixed is None else fixed, most)
        # A drafter on the target's cores does not run ahead, so nothing hides the time in which it drafts the batch.
        drafting_s = assignment.drafter.busy_s(1) / prices.batch
        return assignment.rate.tokens_worth(
            price + prices.rate * drafting_s, min(prices.limit, most)
        )

    def _goodput(
        self, drafts: list[tuple[Sequence, Assignment, int]], prices: _Prices
    ) -> tuple[float, bool]:
        """As `goodput`, of steps with these drafts; the other sequences decode plainly. 0 before anything was measured."""
        batch, decode_step_s = prices.batch, prices.decode_step_s
        if decode_step_s == 0.0:
            return 0.0, True
        if not drafts:
            return batch / decode_step_s, True
        deepest: dict[Drafter, int] = {}
        gained, total = 0.0, 0
        for _, assignment, count in drafts:
            gained += assignment.rate.expected_tokens(count) - 1.0
            total += count
            deepest[assignment.drafter] = max(count, deepest.get(assignment.drafter, 0))
        wait_s = max([drafter.latency(count) for drafter, count in deepest.items()])
        # A drafter drafts for all its sequences together.
        busy_s = sum([drafter.busy_s(count) for drafter, count in deepest.items()])
        steps = steps_meanwhile(wait_s, decode_step_s)
        stands = sum(
            [assignment.all_accepted(steps, count) for _, assignment, count in drafts]
        ) / len(drafts)
        forward_s = self._cost.estimate(batch, batch + total)
        return goodput(
            batch + gained, forward_s, wait_s, busy_s, (float(batch), decode_step_s), stands
        )

    # --- waits ---

    def _waits(
        self, decoding: list[Sequence], draft_tokens: dict[int, int], prices: _Prices, now_s: float
    ) -> tuple[tuple[tuple[Sequence, Assignment], ...], float]:
        """The drafts under way that may still pay, and how many seconds of waiting they are worth."""
        late: list[tuple[float, float, Sequence, Assignment]] = []
        for sequence in decoding:
            wanted = draft_tokens.get(sequence.id, 0)
            pending = pending_draft(sequence, wanted, always=self._always)
            if pending is not None:
                assignment = pending.assignment
                due_s = assignment.due_s(now_s)
                stands = assignment.all_accepted(
                    pending.ready_tokens + steps_meanwhile(due_s, prices.decode_step_s), 1
                )
                gain = (pending.expected_now, pending.expected_with_it)
                seconds = max_wait_s(
                    gain, due_s, prices.rate, prices.batch, prices.decode_step_s, stands
                )
                late.append((due_s, assignment.answer_rate * seconds, sequence, assignment))
        if self._always:
            return tuple(
                [(sequence, assignment) for _, _, sequence, assignment in late]
            ), _LONGEST_WAIT_S
        late.sort(key=itemgetter(0))
        wait_s, patience, count = 0.0, 0.0, 0
        busy_s: dict[Drafter, float] = {}
        for i, (due_s, seconds, _, assignment) in enumerate(late):
            patience += seconds
            drafter = assignment.drafter
            # The target loses this time whether it waits or not.
            busy_s[drafter] = max(busy_s.get(drafter, 0.0), drafter.busy_s(assignment.draft_tokens))
            most_s = min(patience + sum(busy_s.values()), _LONGEST_WAIT_S)
            if due_s <= most_s:
                wait_s, count = most_s, i + 1
        return tuple(
            [(sequence, assignment) for _, _, sequence, assignment in late[:count]]
        ), wait_s


def _drafters(sequences: list[Sequence]) -> frozenset[Drafter]:
    return frozenset(
        [
            assignment.drafter
            for sequence in sequences
            for assignment in sequence.assignments.values()
        ]
    )


def _due_probes(
    decoding: list[Sequence], asks: dict[Assignment, int], silent: frozenset[Drafter], step: int
) -> frozenset[Assignment]:
    """The silent drafters to probe. They are probed in common steps, since a drafter drafts many sequences together."""
    return frozenset(
        [
            assignment
            for sequence in decoding
            for assignment in sequence.assignments.values()
            if assignment not in asks
            and assignment.drafter not in silent
            and step % assignment.backoff == 0
        ]
    )
