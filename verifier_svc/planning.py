"""How deep each sequence is drafted, which drafters are worth asking, and how long to wait for whom: all for goodput.

Goodput is committed tokens over time. A draft token is worth its place in a forward while its chance of being committed is above
the price: what the same time brings elsewhere. Raising a ratio by such prices, anew from each step's outcome, is Dinkelbach's
method (On nonlinear fractional programming, 1967). The more draft tokens a forward has, the more a further one takes, so the price
is that of the last one that is worth it, and they are counted for all sequences together. Knows sequences and measured numbers;
looks at no token, so it cannot bias the output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from outrider.depth_policy import DepthPolicy
from verifier_svc.depth import ForwardCost, goodput, patience_s, price_of_tokens, steps_meanwhile
from verifier_svc.drafters import Drafter
from verifier_svc.sequence import Assignment, Sequence

# Drafters are compared by how soon a draft of so many tokens is there.
_COMPARED_DEPTH = 4
# Share of the time that may be spent on probes, and how much of it, in plain steps, can be saved up.
_PROBE_SHARE = 0.01
_PROBE_STEPS = 2.0
# What a further token of a sequence costs at least, in forwards: a large model's few tokens seem free within what can be measured.
_LEAST_PRICE = 0.005
# By how much speculation must be the faster way, and by how much chance a sequence that drafts may fall short of the price: neither
# prices nor acceptance are known better than that.
_MARGIN, _SLACK = 1.02, 0.05
# For a draft that is waited for whether it pays or not; its drafter may be gone without a word.
_LONGEST_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What steps with drafts are like, for each sequence of a batch: tokens expected, draft tokens among them; seconds that drafts
    take to come, and how many of those the target loses; and whether they stand if steps without them went on meanwhile.
    """

    tokens: float = 1.0
    depth: float = 0.0
    wait_s: float = 0.0
    busy_s: float = 0.0
    stands: float = 1.0


class Planner:
    """Plans for one engine, on its thread. With `always` every draft is waited for and none is paused, whether it pays or not."""

    def __init__(self, policy: DepthPolicy, cost: ForwardCost, *, always: bool = False) -> None:
        self.policy = policy
        self._cost = cost
        self._always = always
        # Whether the depth is the policy's limit, whatever it brings.
        self._by_limit = policy.kind != "goodput" or always
        self._batch = 1
        self._limit = policy.limit(1)
        # Of the last plan; and what follows from it for the next one: seconds of a step without drafts, tokens a second that the
        # batch commits, and up to how many draft tokens take how many of those each.
        self._last = _Outlook()
        self._plain_s = 0.0
        self._rate = 0.0
        self._token_prices: list[tuple[int, float]] = []
        # The chance from which on a draft token is worth its place, among those who draft now.
        self._price = 0.0
        # The drafters whose drafts make up for the wait for them, which is for all, and the price if all of theirs draft; found out
        # when somebody asks.
        self._paying: tuple[set[Drafter], float] | None = None
        self._decoding: list[Sequence] = []
        self._probe_credit_s = 0.0
        # Whether probes were asked for since the last plan.
        self._probing = False
        self.pausing = False
        """Whether a drafter was paused on a decoding sequence at the last plan, so that there is something to probe."""

    @property
    def batch(self) -> int:
        """Sequences that were decoding when last there were any."""
        return self._batch

    @property
    def plain_s(self) -> float:
        """Seconds of a step without drafts at the present batch; 0 before anything was measured."""
        return self._plain_s or self._cost.estimate(self._batch, self._batch)

    def plan(self, running: Iterable[Sequence]) -> None:
        """Set the depth of every sequence for the coming step; a draft may also stand behind a prompt's last token."""
        decoding: list[Sequence] = []
        reading: list[Sequence] = []
        for sequence in running:
            (decoding if sequence.num_uncomputed_tokens == 1 else reading).append(sequence)
        self._limit = self.policy.limit(len(decoding) or 1)
        self._probing = self.pausing = False
        for sequence in decoding:
            for assignment in sequence.assignments.values():
                if assignment.pause.steps_left > 0:
                    self.pausing = True
        if decoding:
            self._batch = len(decoding)
            self._set_prices(decoding, beside_prompts=bool(reading))
            self._plan_decoding(decoding)
        self._decoding, self._paying = decoding, None
        for sequence in reading:
            sequence.depth = self.depth_of(sequence)

    def _plan_decoding(self, decoding: list[Sequence]) -> None:
        chosen: list[tuple[Assignment, int]] = []
        for sequence in decoding:
            sequence.depth, assignment = self._choose(sequence)
            if assignment is not None:
                chosen.append((assignment, sequence.depth))
        self._last = self._outlook(chosen)
        self._rate = self._goodput(self._last)

    def _outlook(self, drafts: list[tuple[Assignment, int]]) -> _Outlook:
        """Steps of the present batch with these drafts of so many tokens, the other sequences decoding plainly."""
        if not drafts:
            return _Outlook()
        deepest: dict[Drafter, int] = {}
        gained = total_depth = 0.0
        for assignment, depth in drafts:
            gained += assignment.rate.expected_tokens(depth) - 1.0
            total_depth += depth
            if depth > deepest.get(assignment.drafter, 0):
                deepest[assignment.drafter] = depth
        wait_s = max(drafter.latency(depth) for drafter, depth in deepest.items())
        # What a drafter drafts it drafts together.
        busy_s = sum(drafter.busy_s(depth) for drafter, depth in deepest.items())
        steps = steps_meanwhile(wait_s, self.plain_s)
        stands = sum([_stands(assignment, depth, steps) for assignment, depth in drafts]) / len(drafts)
        return _Outlook(1.0 + gained / self._batch, total_depth / self._batch, wait_s, busy_s, stands)

    def _goodput(self, outlook: _Outlook) -> float:
        """Tokens a second of the present batch; 0 before anything was measured."""
        batch, plain_s = self._batch, self.plain_s
        if plain_s == 0.0:
            return 0.0
        forward_s = self._cost.estimate(batch, batch + round(batch * outlook.depth))
        plain = (float(batch), plain_s)
        return goodput(batch * outlook.tokens, forward_s, outlook.wait_s, outlook.busy_s, plain, outlook.stands)

    def _set_prices(self, decoding: list[Sequence], beside_prompts: bool) -> None:
        batch, cost = self._batch, self._cost
        self._plain_s = plain_s = cost.estimate(batch, batch)
        # By the last plan at first; the present one follows.
        self._rate = self._goodput(self._last)
        # With a prompt's tokens the forward takes time by each, where those of a few sequences may come almost free. The prompt's
        # own time is no part of what a committed token is worth: it has to be spent either way.
        least_s = max(_LEAST_PRICE * plain_s / batch, cost.prompt_token_s if beside_prompts else 0.0)
        further = cost.further_tokens_s(batch) or [(1, 0.0)]
        self._token_prices = [(count, self._rate * max(seconds, least_s)) for count, seconds in further]
        if not self._by_limit:
            self._price = self._price_among(decoding, None)

    def _price_among(self, decoding: list[Sequence], asked: set[Drafter] | None) -> float:
        """The price of a draft token if these drafters draft, paused or not; or, of all, those who are not paused."""
        chances: list[float] = []
        for sequence in decoding:
            found = [
                self._chances(sequence, assignment)
                for assignment in sequence.assignments.values()
                if (assignment.pause.steps_left == 0 if asked is None else assignment.drafter in asked)
            ]
            if found:
                # Of several that of which the first token is the likeliest.
                chances += max(found)
        chances.sort()
        return price_of_tokens(chances, self._token_prices)

    def _chances(self, sequence: Sequence, assignment: Assignment) -> list[float]:
        """How likely each token that could be drafted is to be committed; 1 for those that are drafted whatever they cost."""
        fixed, most = sequence.request.speculation.draft_tokens, assignment.drafter.hello.max_draft_tokens
        if fixed is not None or assignment.pause.probing:
            return [1.0] * min(1 if fixed is None else fixed, most)
        return assignment.rate.survival[: min(self._limit, most)]

    def _find_paying(self, decoding: list[Sequence]) -> tuple[set[Drafter], float]:
        """The drafters, quick ones first, with whose drafts steps commit the most for their time, waits included; and their price.

        Paused sequences count as if they were not. Empty when plain steps are as good; to begin anew takes more than to go on.
        """
        drafters = {a.drafter for sequence in decoding for a in sequence.assignments.values()}
        margin = _MARGIN if self._last.depth > 0 else _MARGIN**2
        asked: set[Drafter] = set()
        paying: tuple[set[Drafter], float] = (set(), self._price)
        best = margin * self._batch / self.plain_s
        for drafter in sorted(drafters, key=lambda drafter: (drafter.latency(_COMPARED_DEPTH), drafter.id)):
            asked.add(drafter)
            price = self._price_among(decoding, asked)
            rate = self._rate_with(decoding, asked, price)
            if rate > best:
                best, paying = rate, (set(asked), price)
        return paying

    def _rate_with(self, decoding: list[Sequence], asked: set[Drafter], price: float) -> float:
        """Tokens a second of steps with these drafters; only drafts that are worth their places are asked for."""
        drafts: list[tuple[Assignment, int]] = []
        for sequence in decoding:
            found = [
                (self._gain(assignment, depth, price), assignment, depth)
                for assignment in sequence.assignments.values()
                if assignment.drafter in asked and (depth := self.depth_for(sequence, assignment, price)) > 0
            ]
            if found:
                gain, chosen, depth = max(found, key=itemgetter(0))
                if gain >= 0.0:
                    drafts.append((chosen, depth))
        return self._goodput(self._outlook(drafts))

    def _gain(self, assignment: Assignment, depth: int, price: float) -> float:
        """Tokens expected of a draft of so many tokens, less what their places in the forward bring elsewhere."""
        # One by one, so that tokens whose chance is the very price make exactly nothing, and not less by a rounding.
        return sum(chance - price for chance in assignment.rate.survival[:depth])

    def depth_of(self, sequence: Sequence) -> int:
        """Draft tokens of the coming step for a sequence that is planned for alone."""
        return self._choose(sequence)[0]

    def _choose(self, sequence: Sequence) -> tuple[int, Assignment | None]:
        """Whose draft the most is expected of, and its depth."""
        depth, value, chosen = 0, 1.0, None
        for assignment in sequence.assignments.values():
            if assignment.pause.steps_left > 0:
                continue
            worth = self.depth_to_ask(sequence, assignment)
            expected = assignment.rate.expected_tokens(worth)
            if expected > value:
                depth, value, chosen = worth, expected, assignment
        return depth, chosen

    def depth_to_ask(self, sequence: Sequence, assignment: Assignment) -> int:
        """The depth for a drafter that is not paused: of a probe one token, which is what is saved for it, whatever the policy."""
        return 1 if assignment.pause.probing else self.depth_for(sequence, assignment)

    def steps_without(self, assignment: Assignment, depth: int) -> int:
        """Steps that will go on until a draft of so many tokens is there; 0 if it will be waited for."""
        drafter, plain_s = assignment.drafter, self.plain_s
        wait_s = drafter.latency(depth)
        if self._always or wait_s == 0.0 or plain_s == 0.0:
            return 0
        steps = steps_meanwhile(wait_s, plain_s)
        gain = (1.0, assignment.rate.expected_tokens(depth))
        one_s = patience_s(gain, wait_s, self._rate, self._batch, plain_s, _stands(assignment, depth, steps))
        return steps if wait_s > self._batch * one_s + drafter.busy_s(depth) else 0

    def depth_for(self, sequence: Sequence, assignment: Assignment, price: float | None = None) -> int:
        """Draft tokens of this drafter that are worth their place in a step, at the plan's price or another."""
        fixed, most = sequence.request.speculation.draft_tokens, assignment.drafter.hello.max_draft_tokens
        if fixed is not None or self._by_limit:
            limit = self._limit if fixed is None else fixed
            return limit if limit < most else most
        # Where the drafter does not run ahead, nothing hides the time in which the batch is drafted.
        drafting_s = 0.0 if assignment.ahead else assignment.drafter.token_time.value / self._batch
        price = self._price if price is None else price
        return assignment.rate.depth_worth(price + self._rate * drafting_s, min(self._limit, most))

    def pays(self, sequence: Sequence, assignment: Assignment) -> bool:
        """Whether asking this drafter for another draft beats plain steps, and what the sequence's other drafters do.

        Among others the wait is for all, so that a draft has to be worth its place in the forward, and those that are have to make
        up for the wait together. Without others, the sequence is judged as if all were like it.
        """
        plain_s = self.plain_s
        if self._always or plain_s == 0.0:
            return True
        # Those that ended since have no drafters any more.
        if self._paying is None and (decoding := [other for other in self._decoding if other.assignments]):
            self._paying = self._find_paying(decoding)
            # Who comes back from a pause because of that is not alone.
            self._price = max(self._price, self._paying[1])
        others = [other for other in sequence.assignments.values() if other is not assignment and other.pause.steps_left == 0]
        if self._paying is None:
            rate = self._goodput_alike(sequence, assignment)
            worth_it = rate * plain_s > _MARGIN * self._batch
            return worth_it and all(rate >= self._goodput_alike(sequence, other) for other in others)
        paying, price = self._paying
        if assignment.drafter not in paying:
            return False
        # Else a sequence whose chance is about the price, which its own last draft moves, would be paused and asked by turns.
        least = price if assignment.pause.steps_left > 0 else max(price - _SLACK, 0.0)
        depth = self.depth_for(sequence, assignment, least)
        gain = self._gain(assignment, depth, least)
        rivals = [other for other in others if other.drafter in paying]
        gains = [self._gain(other, self.depth_for(sequence, other, least), least) for other in rivals]
        return depth > 0 and gain >= max([0.0, *gains])

    def _goodput_alike(self, sequence: Sequence, assignment: Assignment) -> float:
        """Tokens a second of the batch, were all its sequences like this one with this drafter."""
        price = price_of_tokens(sorted(self._chances(sequence, assignment) * self._batch), self._token_prices)
        drafter, rate, depth = assignment.drafter, assignment.rate, self.depth_for(sequence, assignment, price)
        wait_s = drafter.latency(depth)
        stands = _stands(assignment, depth, steps_meanwhile(wait_s, self.plain_s))
        return self._goodput(_Outlook(rate.expected_tokens(depth), depth, wait_s, drafter.busy_s(depth), stands))

    def worth_waiting_for(self, running: Iterable[Sequence], now_s: float) -> tuple[list[Assignment], float]:
        """The drafts under way that may still pay, and how many seconds of waiting they are worth."""
        late: list[tuple[float, float, Assignment]] = []
        for sequence in running:
            found = awaited(sequence) if sequence.num_uncomputed_tokens == 1 else None
            if found is not None:
                assignment, length, now, promised = found
                due_s = assignment.due_s(now_s)
                stands = _stands(assignment, 1, length + steps_meanwhile(due_s, self.plain_s))
                gain = (now, promised)
                seconds = patience_s(gain, due_s, self._rate, self._batch, self.plain_s, stands)
                late.append((due_s, assignment.answer_rate * seconds, assignment))
        if self._always:
            return [assignment for _, _, assignment in late], _LONGEST_WAIT_S
        late.sort(key=itemgetter(0))
        budget_s, patience, count = 0.0, 0.0, 0
        busy_s: dict[Drafter, float] = {}
        for i, (due_s, seconds, assignment) in enumerate(late):
            patience += seconds
            _note_busy(busy_s, assignment, assignment.draft_tokens)
            most_s = min(patience + sum(busy_s.values()), _LONGEST_WAIT_S)
            if due_s <= most_s:
                budget_s, count = most_s, i + 1
        worth = [assignment for _, _, assignment in late[:count]]
        probes = [a for _, _, a in late if a.pause.probing and a not in worth] if self._probe_credit_s > 0 else []
        if probes or any(assignment.pause.probing for assignment in worth):
            budget_s = max(budget_s, self._probe_credit_s)
        return worth + probes, budget_s

    def affords_probe(self, assignment: Assignment) -> bool:
        """Whether enough was saved for a probe; if so, its place in the forward is paid.

        The first of a step pays for one of every sequence, since a forward's first further token can cost as much as the next
        fifteen; so those that are due with it are free. What is left has to last for the answer, since one that comes late
        teaches nothing.
        """
        batch = self._batch
        places_s = 0.0 if self._probing else max(self._cost.estimate(batch, 2 * batch) - self.plain_s, 0.0)
        # No more than can be saved up at all.
        if self._probe_credit_s < min(places_s + assignment.drafter.latency(1), _PROBE_STEPS * self.plain_s):
            return False
        self._probing = True
        self._probe_credit_s -= places_s
        return True

    def waited(self, seconds: float, step_s: float, probes: Iterable[Assignment]) -> None:
        """A wait ended, before a step like the last one; waits for probes are paid from what was saved for them.

        Of `step_s`, that step's time, a share is saved. It is 0 for a step in which there is nothing to probe: what plain traffic
        takes must not be spent on the next request that speculates.
        """
        probing = any(assignment.pause.probing for assignment in probes)
        credit_s = self._probe_credit_s + _PROBE_SHARE * step_s - (seconds if probing else 0.0)
        self._probe_credit_s = min(credit_s, _PROBE_STEPS * self.plain_s)


def _stands(assignment: Assignment, depth: int, count: int) -> float:
    """Probability that a draft has its next `count` tokens right; 0 where so many and then `depth` are more than it can have."""
    return assignment.rate.stands(count) if depth + count <= assignment.trie.window.depth else 0.0


def _note_busy(busy_s: dict[Drafter, float], assignment: Assignment, depth: int) -> None:
    """Seconds that the target's cores spend on drafting, by drafter: what one drafts it drafts together."""
    drafter = assignment.drafter
    if drafter.on_target_cores:
        busy_s[drafter] = max(busy_s.get(drafter, 0.0), drafter.busy_s(depth))


def awaited(sequence: Sequence) -> tuple[Assignment, int, float, float] | None:
    """The best draft under way for a sequence if it is better than what is there: whose it is; what is there, as draft tokens and
    as tokens expected of a step; and what is expected of a step with that draft.
    """
    limit, length, now = sequence.draft_limit, 0, 1.0
    if limit == 0:
        return None
    under_way: list[tuple[float, Assignment]] = []
    for assignment in sequence.assignments.values():
        if assignment.pause.steps_left == 0 and assignment.answered_length > 0:
            depth = min(limit, assignment.drafter.hello.max_draft_tokens)
            if not assignment.trie.ready(depth):
                under_way.append((assignment.rate.expected_tokens(depth), assignment))
    if not under_way:
        return None
    for assignment in sequence.assignments.values():
        there = assignment.trie.length(limit)
        if (expected := assignment.rate.expected_tokens(there)) > now:
            length, now = there, expected
    promised, best = max(under_way, key=itemgetter(0))
    return (best, length, now, promised) if promised > now else None
