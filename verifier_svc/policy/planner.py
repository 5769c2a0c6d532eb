"""Plans each step's drafts: how many tokens, from which drafters, and how long to wait for them.

The planner maximises goodput. It reads sequences and measured numbers, and writes nothing. It looks
at no token, so it cannot bias the output.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from verifier_svc.policy import asks
from verifier_svc.policy.asks import Drafts
from verifier_svc.policy.draft_policy import EVERY_DRAFT, PAYING_DRAFTS, DraftPolicy, Offer
from verifier_svc.policy.draft_trees import tree_tokens, wants_tree
from verifier_svc.policy.forward_cost import ForwardCost
from verifier_svc.policy.goodput import (
    StepCosts,
    acceptance_threshold,
    goodput,
    step_costs,
    steps_meanwhile,
)
from verifier_svc.policy.plan import Plan
from verifier_svc.policy.speculation_budget import SpeculationBudget
from verifier_svc.policy.waits import drafts_to_wait_for
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.sequence import Assignment, Sequence

# Drafters are ordered by how soon they deliver a draft of `_COMPARED_TOKENS` tokens.
_COMPARED_TOKENS = 4
# The longest wait of a step for drafts if its requests have `always_draft`.
_ALWAYS_DRAFT_WAIT_S = 0.05
# Unless drafts make the batch faster than plain steps by this factor, no drafter is chosen.
_MARGIN = 1.01
# Drafts for which no step waits speed up few sequences, but slow down all sequences. Moreover, the
# first rows of a kernel's block of rows cost more than the block's other rows. So the gain of these
# drafts must be this many times their cost.
_LEAST_GAIN = 1.5


class _Choice(NamedTuple):
    """A set of drafters, the drafts that pay with it at `threshold`, and the resulting goodput."""

    drafts: Drafts
    drafters: frozenset[Drafter]
    threshold: float
    rate: float = 0.0
    """The number of tokens a second."""
    waits: bool = True
    """True if each forward waits for the drafts; False if plain steps go on meanwhile."""


class Outline(NamedTuple):
    """The part of a plan that does not depend on which drafts have come.

    `Planner.finish` adds the other part. An outline may be made while the previous step computes,
    so it uses the rates from before that step's end.
    """

    plan: Plan
    decoding: list[Sequence]
    drafts: Drafts
    listened: Drafts
    costs: StepCosts | None
    """None if no drafter is asked."""
    rate: float
    """The batch's number of tokens a second with the planned drafts."""
    measures: bool
    """True if the policy wanted steps without drafts."""

    def without_ended(self, running: Mapping[int, Sequence]) -> Outline:
        """Return the outline without the sequences whose ids are not in `running`."""
        if len(running) == len(self.decoding):
            return self
        return self._replace(
            decoding=[each for each in self.decoding if each.id in running],
            drafts=[draft for draft in self.drafts if draft[0].id in running],
            listened=[draft for draft in self.listened if draft[0].id in running],
        )


class Planner:
    """Makes the plans of one engine; the engine's policy says how many tokens to draft.

    With `trees`, steps may verify trees of draft tokens.
    """

    def __init__(
        self,
        policy: DraftTokensPolicy,
        cost: ForwardCost,
        budget: SpeculationBudget,
        draft_policy: DraftPolicy = PAYING_DRAFTS,
        *,
        trees: bool = False,
    ) -> None:
        self._tokens_policy = policy
        self._cost = cost
        self.budget = budget
        self._draft_policy = draft_policy
        self._trees = trees
        # True to draft the policy's maximum even where it costs throughput.
        self._by_limit = policy.kind != "goodput" or draft_policy.most_tokens
        # Plans the steps of requests with `always_draft`.
        self._always_draft_planner: Planner | None = None
        if draft_policy is not EVERY_DRAFT:
            self._always_draft_planner = Planner(policy, cost, budget, EVERY_DRAFT, trees=trees)

    def outline_for_always_draft(
        self, running: Collection[Sequence], last: Plan, step: int
    ) -> Outline:
        """Like `outline`, for a plan whose waits take at most `_ALWAYS_DRAFT_WAIT_S`.

        The paying drafters stay as in the last plan, since they matter to other requests.
        """
        outline = self.outline(running, last, step)
        plan = replace(
            outline.plan,
            always_draft_requested=True,
            speedup=last.speedup,
            threshold=last.threshold,
            paying=last.paying,
            considered=last.considered,
            unprobed=last.unprobed,
        )
        return outline._replace(plan=plan)

    def plan(self, running: Collection[Sequence], last: Plan, step: int, now_s: float) -> Plan:
        """Return the plan of step number `step`, made at `now_s`; `last` is the plan before it."""
        return self.finish(self.outline(running, last, step), now_s)

    def finish(self, outline: Outline, now_s: float) -> Plan:
        """Return the plan of an outline: what to verify, and what to wait for from `now_s` on."""
        plan, costs = outline.plan, outline.costs
        if costs is None:
            return plan
        draft_tokens = asks.draft_tokens(outline.drafts)
        wait_for, wait_s = drafts_to_wait_for(
            outline.decoding, draft_tokens, costs, outline.rate, now_s, plan.policy
        )
        if outline.listened:
            draft_tokens |= self._ready_tokens(outline.drafts, outline.listened, costs)
        if plan.always_draft_requested:
            wait_s = min(wait_s, _ALWAYS_DRAFT_WAIT_S)
        return replace(plan, draft_tokens=draft_tokens, wait_for=wait_for, wait_s=wait_s)

    def holds(self, outline: Outline) -> bool:
        """True if the policy's answer to `measures` has not changed since the outline was made."""
        plan = outline.plan
        if plan.always_draft_requested:
            return True
        return outline.measures == self._draft_policy.measures(self.budget, plan.batch)

    def outline(self, running: Collection[Sequence], last: Plan, step: int) -> Outline:
        """Return the outline of the plan of step number `step`; `last` is the plan before it."""
        if self._always_draft_planner is not None and _all_have_always_draft(running):
            return self._always_draft_planner.outline_for_always_draft(running, last, step)
        decoding: list[Sequence] = []
        reading: list[Sequence] = []
        for sequence in running:
            (decoding if sequence.num_uncomputed_tokens == 1 else reading).append(sequence)
        batch = len(decoding) or last.batch
        drafters = _drafters(decoding)
        newcomers = _drafters(reading)
        measures = self._draft_policy.measures(self.budget, batch)
        if not drafters and not newcomers:
            plan = self._plan_without_drafts(batch, (), last)
            return Outline(plan, decoding, [], [], None, 0.0, measures)
        if measures:
            plan = self._plan_without_drafts(batch, running, last)
            return Outline(replace(plan, measuring=True), decoding, [], [], None, 0.0, measures)
        costs = self._costs(batch, last, beside_prompts=bool(reading))
        choice = _Choice([], last.paying, last.threshold)
        considered = last.considered
        if drafters:
            choice = self._choose(decoding, self._credible(drafters), costs)
            considered = drafters
        unprobed = self._draft_policy.unprobed(self.budget, batch, choice.drafters, considered)
        drafts = choice.drafts
        if newcomers:
            unknown = self._credible(newcomers - considered)
            drafts = drafts + self._first_drafts(reading, unknown, choice, costs)
        listened = self._listened(decoding, drafters, drafts, choice, costs, step)
        asked = drafts
        if self._trees:
            asked = drafts + asks.companions(drafts, choice.drafters, choice.threshold)
        tokens = asks.asked_tokens(asked, choice.waits, costs.decode_step_s)
        trials = asks.trials(decoding, drafters, asked, unprobed)
        tokens |= asks.asked_tokens(trials, False, costs.decode_step_s)
        rate = choice.rate or costs.rate
        tokens |= asks.asked_tokens(listened, False, costs.decode_step_s)
        plan = Plan(
            batch=costs.batch,
            decode_step_s=costs.decode_step_s,
            speedup=max(rate * costs.decode_step_s / costs.batch, 1.0),
            threshold=choice.threshold,
            planned_ids=frozenset([sequence.id for sequence in (*decoding, *reading)]),
            token_costs=costs.token_costs if self._trees else (),
            fixed=self._tokens_policy.kind != "goodput",
            asks=tokens,
            tree_tokens=tree_tokens(asked, tokens, choice.threshold, step) if self._trees else {},
            probes=asks.due_probes(decoding, tokens, unprobed, step),
            policy=self._draft_policy,
            paying=choice.drafters.union([assignment.drafter for _, assignment, _ in listened]),
            considered=considered,
            unprobed=unprobed,
        )
        return Outline(plan, decoding, drafts, listened, costs, rate, measures)

    def _listened(
        self,
        decoding: list[Sequence],
        drafters: frozenset[Drafter],
        drafts: Drafts,
        choice: _Choice,
        costs: StepCosts,
        step: int,
    ) -> Drafts:
        """Return the drafts of `asks.listened`; none if their budget is exhausted."""
        step_s = costs.decode_step_s
        if self._by_limit or step_s == 0.0:
            return []
        # After many right guesses, at least this share of guesses must be right to pay for the
        # cheapest rows.
        least_right = _LEAST_GAIN * costs.token_costs[0][1]
        found = asks.listened(decoding, drafters, drafts, costs.limit, least_right, step_s, step)
        together = choice.drafters.union([assignment.drafter for _, assignment, _ in found])
        return found if self.budget.allows(costs.batch, together) else []

    def _ready_tokens(self, drafts: Drafts, listened: Drafts, costs: StepCosts) -> dict[int, int]:
        """Return the draft tokens to verify with `listened` drafts, keyed by sequence id.

        The result is empty if no such draft is ready, or if the ready drafts together gain too
        little.
        """
        ready = [
            (sequence, assignment, there)
            for sequence, assignment, count in listened
            if (there := assignment.ready_tokens(min(count, sequence.most_draft_tokens)))
        ]
        if not ready:
            return {}
        every = [*drafts, *ready]
        probs = sorted([prob for _, each, count in every for prob in each.rate.cumulative[:count]])
        threshold = acceptance_threshold(probs, costs.token_costs)
        found = asks.draft_tokens(drafts)
        planned = sum(found.values())
        gain = 0.0
        for sequence, assignment, there in ready:
            expected = assignment.rate.expected_tokens
            before = found.get(sequence.id, 0)
            count = assignment.rate.tokens_worth(threshold, there)
            if count > before:
                gain += expected(count) - expected(before)
                found[sequence.id] = count
        batch = costs.batch
        with_s = self._cost.estimate(batch, batch + sum(found.values()))
        without_s = self._cost.estimate(batch, batch + planned)
        least = _LEAST_GAIN * costs.rate * (with_s - without_s)
        return found if gain >= least else {}

    def _plan_without_drafts(self, batch: int, planned: Collection[Sequence], last: Plan) -> Plan:
        """Return a plan that asks no drafter, to measure baseline steps or for lack of drafters.

        The plan keeps what the last plan decided about drafters.
        """
        return Plan(
            batch,
            self._cost.estimate(batch, batch),
            threshold=last.threshold,
            planned_ids=frozenset([sequence.id for sequence in planned]),
            paying=last.paying,
            considered=last.considered,
            unprobed=last.unprobed,
        )

    def _credible(self, drafters: frozenset[Drafter]) -> frozenset[Drafter]:
        """Return the drafters that may be asked for drafts, and not only probed or tried.

        Beside proven drafters, the high prior of a drafter on trial would displace drafts that
        work. `asks.trials` tries such a drafter instead. On the target's device it gets no trials,
        because they would cost forward time; so there it may be asked like a proven drafter.
        """
        known = [drafter for drafter in drafters if self._draft_policy.may_draft(drafter)]
        if self._draft_policy.takes_all or not any(drafter.proven for drafter in known):
            return frozenset(known)
        return frozenset([d for d in known if d.proven or d.on_target_device])

    def first_draft_tokens(self, sequence: Sequence, assignment: Assignment, last: Plan) -> int:
        """Return how many draft tokens to ask for with a new sequence; 0 if that does not pay."""
        drafter = assignment.drafter
        if drafter in last.considered and drafter not in last.paying:
            return 0
        if not self._draft_policy.may_draft(drafter):
            return 0
        costs = self._costs(last.batch, last, beside_prompts=False)
        return self._tokens_worth(sequence, assignment, last.threshold, costs)

    def _costs(self, batch: int, last: Plan, *, beside_prompts: bool) -> StepCosts:
        limit = self._tokens_policy.limit(batch)
        return step_costs(self._cost, batch, last.speedup, limit, beside_prompts=beside_prompts)

    def _choose(
        self, decoding: list[Sequence], drafters: frozenset[Drafter], costs: StepCosts
    ) -> _Choice:
        """Return the set of drafters with the highest goodput, waits included.

        Tries the quickest drafter alone, then the two quickest, and so on. The set is empty if no
        set beats plain steps by the margin. A drafter that pays by itself stays in the set, as a
        companion, if the set loses nothing by it.
        """
        if self._draft_policy.takes_all or costs.decode_step_s == 0.0:
            return self._choice_of(decoding, drafters, costs)
        asked: frozenset[Drafter] = frozenset()
        plain_rate = costs.batch / costs.decode_step_s
        best = _Choice([], asked, costs.token_costs[0][1], plain_rate)
        least = _MARGIN * plain_rate
        for drafter in sorted(
            drafters, key=lambda drafter: (drafter.latency(_COMPARED_TOKENS), drafter.id)
        ):
            asked |= {drafter}
            if not self.budget.allows(costs.batch, asked):
                continue
            choice = self._choice_of(decoding, asked, costs)
            if choice.rate > least:
                best = choice
                least = choice.rate
            elif best.drafters and choice.rate >= least:
                alone = self._choice_of(decoding, frozenset([drafter]), costs)
                if alone.rate > _MARGIN * plain_rate:
                    best = choice
        return best

    def _choice_of(
        self, decoding: list[Sequence], drafters: frozenset[Drafter], costs: StepCosts
    ) -> _Choice:
        """Return the choice of these drafters, with the drafts that are worth their places."""
        accept_probs: list[float] = []
        for sequence in decoding:
            asked = [a for a in sequence.assignments.values() if a.drafter in drafters]
            if asked:
                # Proven drafters come first. Among these, take the drafter whose first token is
                # most likely right.
                likeliest = max(asked, key=_first_token) if len(asked) > 1 else asked[0]
                accept_probs += self._accept_probs(sequence, likeliest, costs)
        accept_probs.sort()
        choice = _Choice([], drafters, acceptance_threshold(accept_probs, costs.token_costs))
        drafts = [draft for sequence in decoding for draft in self._pick(sequence, choice, costs)]
        rate, waits = self._goodput(drafts, choice.threshold, costs)
        return _Choice(
            drafts, drafters, choice.threshold, rate, waits or self._draft_policy.takes_all
        )

    def _accept_probs(
        self, sequence: Sequence, assignment: Assignment, costs: StepCosts
    ) -> list[float]:
        """Return for each token that could be drafted the probability that it is committed.

        The probability counts as 1 for tokens that the request demands at any cost.
        """
        fixed = sequence.request.speculation.draft_tokens
        most = assignment.drafter.hello.max_draft_tokens
        if fixed is not None:
            return [1.0] * min(fixed, most)
        return assignment.rate.cumulative[: min(costs.limit, most)]

    def _pick(self, sequence: Sequence, choice: _Choice, costs: StepCosts) -> Drafts:
        """Return the sequence's drafts that are worth their cost, as the policy picks them."""
        offers: list[Offer] = []
        for assignment in sequence.assignments.values():
            if assignment.drafter in choice.drafters:
                count = self._tokens_worth(sequence, assignment, choice.threshold, costs)
                drafted, right = assignment.promise(count)
                gain = right - drafted * choice.threshold
                if count > 0 and gain > self._draft_policy.least_gain:
                    gain *= assignment.chance
                    offers.append((assignment.drafter.right_guesses, gain, assignment, count))
        if len(offers) > 1:
            offers = self._draft_policy.pick(offers)
        return [(sequence, assignment, count) for _, _, assignment, count in offers]

    def _first_drafts(
        self,
        reading: list[Sequence],
        unknown: frozenset[Drafter],
        choice: _Choice,
        costs: StepCosts,
    ) -> Drafts:
        """Return the drafts to ask for sequences whose prompt is not finished.

        A draft may follow the prompt's last token. `unknown` drafters, about which no plan has
        decided yet, count as paying.
        """
        choice = choice._replace(drafters=choice.drafters | unknown)
        return [draft for sequence in reading for draft in self._pick(sequence, choice, costs)]

    def _tokens_worth(
        self, sequence: Sequence, assignment: Assignment, threshold: float, costs: StepCosts
    ) -> int:
        """Return how many draft tokens of this drafter are worth their place in a step."""
        fixed = sequence.request.speculation.draft_tokens
        most = assignment.drafter.hello.max_draft_tokens
        if fixed is not None:
            return min(fixed, most)
        if self._by_limit:
            return min(costs.limit, most)
        # A drafter on the target's device does not run ahead, so forwards do not hide its drafting
        # time.
        drafting_s = assignment.drafter.busy_s(1) / costs.batch
        threshold += costs.rate * drafting_s
        return assignment.rate.tokens_worth(threshold, min(costs.limit, most))

    def _goodput(self, drafts: Drafts, threshold: float, costs: StepCosts) -> tuple[float, bool]:
        """Return `goodput` of steps with these drafts; sequences without a draft decode plainly.

        The rate is 0 before anything was measured.
        """
        batch = costs.batch
        decode_step_s = costs.decode_step_s
        if decode_step_s == 0.0:
            return 0.0, True
        if not drafts:
            return batch / decode_step_s, True
        longest: dict[Drafter, float] = {}
        gained = 0.0
        total = 0.0
        for sequence, assignment, count in drafts:
            chance = assignment.chance
            drafted, right = assignment.promise(count)
            gained += chance * right
            total += chance * drafted
            # A draft of fixed length has no further tokens for branches.
            fixed = self._by_limit or sequence.request.speculation.draft_tokens is not None
            if self._trees and not fixed and wants_tree(sequence, assignment, threshold):
                # A tree has about one more token beside each token of the main path.
                prob_wrong = 1.0 - assignment.rate.prob_all_accepted(count)
                gained += chance * assignment.sibling_rates.added_tokens(prob_wrong)
                total += chance * count
            longest[assignment.drafter] = max(drafted, longest.get(assignment.drafter, 0.0))
        wait_s = max([drafter.latency(count) for drafter, count in longest.items()])
        # A drafter drafts for all its sequences at once, so its longest draft decides.
        busy_s = sum([drafter.busy_s(count) for drafter, count in longest.items()])
        steps = steps_meanwhile(wait_s, decode_step_s)
        probs = [assignment.prob_all_accepted(steps, count) for _, assignment, count in drafts]
        prob_all_accepted = sum(probs) / len(drafts)
        forward_s = self._cost.estimate(batch, batch + round(total))
        plain = (float(batch), decode_step_s)
        return goodput(batch + gained, forward_s, wait_s, busy_s, plain, prob_all_accepted)


def _all_have_always_draft(running: Collection[Sequence]) -> bool:
    """True if all sequences have `always_draft` and one tenant, so that no other tenant waits."""
    tenant: str | None = None
    for sequence in running:
        request = sequence.request
        if not request.speculation.always_draft or tenant not in (None, request.tenant):
            return False
        tenant = request.tenant
    return tenant is not None


def _first_token(assignment: Assignment) -> tuple[int, float]:
    """Return a key for `max`: the drafter's right guesses, then the chance of a right first token.

    All proven drafters have the same number of right guesses, the largest.
    """
    return assignment.drafter.right_guesses, assignment.chance * assignment.rate.cumulative[0]


def _drafters(sequences: list[Sequence]) -> frozenset[Drafter]:
    return frozenset(
        [
            assignment.drafter
            for sequence in sequences
            for assignment in sequence.assignments.values()
        ]
    )
