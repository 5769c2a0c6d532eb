"""A verifier of the simulation: events advance the production engine."""

from __future__ import annotations

from outrider.lm.pages import PagePool
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider_bench.simulator.engine_actor import EngineActor
from outrider_bench.simulator.events import Events
from outrider_bench.simulator.heads import SimulatedStates
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.target import SimulatedTarget, SimulatedVerifier
from outrider_bench.simulator.world import World
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT, PAYING_DRAFTS
from verifier_svc.state.target_device import TargetDevice

_PAGE_SIZE = 16
_TRIAL_CONTEXT = 128
# Trial forwards begin this long before a verifier serves.
_WARM_UP_S = 1000.0
TARGET_DEVICE = TargetDevice(cores=frozenset({0}))


class VerifierActor(EngineActor):
    """The production engine with a simulated target, as a scenario describes them."""

    def __init__(
        self,
        events: Events,
        name: str,
        scenario: Scenario,
        world: World,
    ) -> None:
        super().__init__(events)
        self.name = name
        self.hidden_size = scenario.hidden_size
        costs = scenario.costs
        self.metrics = VerifierMetrics(name)
        self.target = SimulatedTarget(events, costs, world.random("noise", name), scenario.noise)
        self.pool = PagePool(
            scenario.page_count, _PAGE_SIZE, prefix_caching=scenario.prefix_caching
        )
        self.engine = Engine(
            self.target,
            self.pool,
            self._deliver,
            self.metrics,
            EngineConfig(
                draft_tokens_policy=DraftTokensPolicy.parse(scenario.draft_tokens),
                max_batch_tokens=scenario.max_batch_tokens,
                max_sequences=scenario.max_sequences,
                max_waiting=1_000_000,
                draft_trees=scenario.draft_trees,
            ),
            SimulatedVerifier(events, costs, world),
            draft_policy=EVERY_DRAFT if scenario.always_draft else PAYING_DRAFTS,
            target_device=TARGET_DEVICE,
            clock=events.clock,
            features=SimulatedStates(scenario.hidden_size),
        )
        self._warm_up()

    def _warm_up(self) -> None:
        """Run the trial forwards in the time before now."""
        started = self._events.now
        self._events.now = started - _WARM_UP_S
        self.engine.warm_up(_TRIAL_CONTEXT)
        self._events.now = started

    def check_idle(self) -> None:
        """Raise RuntimeError unless every sequence has ended and every page is free."""
        if self.engine.sequences:
            raise RuntimeError(f"{self.name} still has {len(self.engine.sequences)} sequences")
        if self.pool.used_count:
            raise RuntimeError(f"{self.name} still holds {self.pool.used_count} pages")
        self.pool.check_integrity()
