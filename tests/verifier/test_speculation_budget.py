"""Speculation loses no more than its budgets. Plain steps take 1 s unless a test says otherwise."""

from collections.abc import Callable

from outrider.protocol.draft_messages import Hello
from verifier_svc.policy.forward_cost import ForwardCost
from verifier_svc.policy.speculation_budget import SpeculationBudget
from verifier_svc.state.drafter import Drafter

BATCH = 8
NOBODY: frozenset[Drafter] = frozenset()


def make_drafter(name: str) -> Drafter:
    return Drafter(Hello(name, name, "f", 8), lambda message: None)


ONE = make_drafter("one")
OTHER = make_drafter("other")
DRAFTER_SET = frozenset({ONE})
OTHER_SET = frozenset({OTHER})


class Steps:
    """A budget, and the steps that it observes."""

    def __init__(self, *, baseline_s: float = 1.0, batches: tuple[int, ...] = (BATCH,)) -> None:
        """Each batch size has had its first baseline steps, of `baseline_s` seconds."""
        isolated = ForwardCost()
        for batch in (1, 64):
            isolated.calibrate(batch, batch, 1.0)
        self.budget = SpeculationBudget(isolated)
        for batch in batches:
            self.baseline_until_measured(batch, baseline_s)

    def baseline(self, seconds: float = 1.0, batch: int = BATCH) -> None:
        self.budget.observe(batch, NOBODY, batch, seconds, baseline=True)

    def gain(
        self, steps: float, drafters: frozenset[Drafter] = DRAFTER_SET, batch: int = BATCH
    ) -> None:
        """Observe a step that commits as many tokens as 1 + `steps` plain steps."""
        self.budget.observe(batch, drafters, round(batch * (1 + steps)), 1.0, baseline=False)

    def lose(
        self, steps: float, drafters: frozenset[Drafter] = DRAFTER_SET, batch: int = BATCH
    ) -> None:
        """Observe a step without gain that takes as long as 1 + `steps` plain steps."""
        self.budget.observe(batch, drafters, batch, 1.0 + steps, baseline=False)

    def baseline_until_measured(self, batch: int, seconds: float = 1.0) -> int:
        """Return how many baseline steps pass before the budget needs no more of them."""
        return count_until(
            lambda: not self.budget.needs_baseline(batch), lambda: self.baseline(seconds, batch)
        )

    def losses_until_refused(
        self, drafters: frozenset[Drafter] = DRAFTER_SET, batch: int = BATCH
    ) -> int:
        """Return how many plain steps a drafter set loses, one at a time, before it is refused."""
        return count_until(
            lambda: not self.budget.allows(batch, drafters), lambda: self.lose(1.0, drafters, batch)
        )


def count_until(reached: Callable[[], bool], act: Callable[[], None]) -> int:
    """Return how many times to act until a condition holds."""
    for count in range(10_000):
        if reached():
            return count
        act()
    raise AssertionError("not reached in 10,000 acts")


# --- baseline steps ---


def test_a_new_batch_size_begins_with_four_baseline_steps() -> None:
    steps = Steps(batches=())
    for batch in (1, BATCH):
        assert steps.baseline_until_measured(batch) == 4


def test_baseline_steps_come_again_ever_more_rarely() -> None:
    steps = Steps()
    gaps = []
    for _ in range(6):
        gaps.append(
            count_until(lambda: steps.budget.needs_baseline(BATCH), lambda: steps.gain(0.0))
        )
        steps.baseline_until_measured(BATCH)
    # The step that ends a run of baseline steps is the first step of the gap.
    assert gaps == [127, 255, 511, 1023, 1023, 1023]


def test_a_host_that_slows_down_every_step_is_no_loss() -> None:
    steps = Steps(baseline_s=1.5)
    for _ in range(100):
        steps.lose(0.5)
    assert steps.budget.allows(BATCH, DRAFTER_SET)


# --- losses and gains ---


def test_a_way_is_refused_when_it_has_lost_six_steps() -> None:
    assert Steps().losses_until_refused() == 7


def test_probes_are_refused_when_they_have_lost_two_steps() -> None:
    assert Steps().losses_until_refused(NOBODY) == 3


def test_one_step_that_was_held_up_loses_no_more_than_two_steps() -> None:
    steps = Steps()
    steps.lose(1000.0)
    assert steps.losses_until_refused() == 5


def test_a_way_that_gained_may_lose_more_but_not_all_of_its_gains() -> None:
    steps = Steps()
    for _ in range(40):
        steps.gain(1.0)
    assert steps.losses_until_refused() == 6 + 40 // 8 + 1


# --- drafter sets that are refused ---


def test_in_the_long_run_speculation_loses_its_budgets_and_half_a_percent() -> None:
    steps = Steps()
    lost = 0.0
    passed = 0.0
    for _ in range(20_000):
        if steps.budget.allows(BATCH, DRAFTER_SET):
            steps.lose(1.0)
            lost += 1.0
            passed += 2.0
        else:
            steps.baseline()
            passed += 1.0
    assert 6 + 0.004 * passed < lost < 6 + 0.005 * passed + 2


# --- a machine that gets busier ---


def test_a_refused_drafter_set_begins_anew_when_baseline_steps_are_slower() -> None:
    steps = Steps()
    steps.losses_until_refused()
    assert (
        count_until(lambda: steps.budget.allows(BATCH, DRAFTER_SET), lambda: steps.baseline(1.5))
        == 16
    )
    for _ in range(100):
        steps.lose(0.5)
    assert steps.budget.allows(BATCH, DRAFTER_SET), (
        "steps are compared with the slower baseline steps"
    )
    # A plain step takes 1.5 s now. Each step below takes 3 s, so it loses one of the new budget's 3
    # steps.
    assert (
        count_until(lambda: not steps.budget.allows(BATCH, DRAFTER_SET), lambda: steps.lose(2.0))
        == 4
    )


def test_a_load_that_grows_again_and_again_forgives_no_more_than_six_steps() -> None:
    steps = Steps()
    steps.losses_until_refused()
    losses = 0
    for _ in range(20):
        for _ in range(64):
            steps.baseline(1.0)
        for _ in range(16):
            steps.baseline(1.5)
        losses += count_until(
            lambda: not steps.budget.allows(BATCH, DRAFTER_SET), lambda: steps.lose(2.0)
        )
    # The budgets are 3 and 1.5 steps, and 0.5 % of 1,600 steps refill them. Each budget is exceeded
    # by a last loss.
    assert 6 <= losses <= 4 + 2 + 20 * 80 * 0.005 + 1


# --- sizes of batches ---


def test_a_new_size_begins_with_the_budget_of_the_nearest_one() -> None:
    steps = Steps(batches=(1, 16, 32, 64))
    steps.gain(0.0, batch=1)
    steps.losses_until_refused(batch=32)
    for batch in (16, 64):
        assert not steps.budget.allows(batch, DRAFTER_SET)
        steps.gain(0.0, batch=batch)
        assert not steps.budget.allows(batch, DRAFTER_SET)
    for _ in range(3):
        steps.lose(1.0, batch=2)
    assert steps.losses_until_refused(batch=1) == 7, "the copy has a balance of its own"


def test_a_drafter_that_left_takes_its_ways_with_it() -> None:
    steps = Steps()
    for drafters in (DRAFTER_SET, DRAFTER_SET | OTHER_SET, OTHER_SET):
        steps.losses_until_refused(drafters)
    steps.budget.forget(ONE)
    assert steps.budget.allows(BATCH, DRAFTER_SET)
    assert steps.budget.allows(BATCH, DRAFTER_SET | OTHER_SET)
    assert not steps.budget.allows(BATCH, OTHER_SET)
