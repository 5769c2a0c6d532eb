"""Plans follow measurements: acceptance by position, costs of forwards, drafting times."""

import platform
from collections.abc import Mapping, Sequence

import pytest

from outrider.errors import OutriderError
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import SpeculationOptions, TokenRequest
from outrider.protocol.model_info import Placement
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, make_engine, make_plan
from verifier_svc.drafts.new_assignment import run_ahead_window
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.state.acceptance_rate import AcceptanceRate
from verifier_svc.state.target_device import TargetDevice


@pytest.mark.parametrize(
    "text", ["", "fast", "auto:3", "fixed", "fixed:x", "fixed:65", "goodput:-1"]
)
def test_an_unknown_policy_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        OutriderError,
        match="draft_tokens must be goodput, goodput:MAX, auto or fixed:K, with at most 64",
    ):
        DraftTokensPolicy.parse(text)


def test_beside_a_prompt_a_draft_token_costs_what_the_prompts_tokens_do() -> None:
    engine, _ = make_engine(eos_bias=-99, page_count=256, config=EngineConfig(DraftTokensPolicy()))
    # Without a prompt, draft tokens cost nothing.
    for drafted in (0, 8):
        engine.cost.calibrate(1, 1 + drafted, 0.1)
    engine.cost.prompt_token_s = 0.05
    ScriptedDrafter(engine)
    decoding = engine.submit(TokenRequest([1], 50, GREEDY), Client())
    engine.step()
    alone = make_plan(engine).draft_tokens.get(decoding.id, 0)
    engine.submit(TokenRequest([1] * 40, 50, GREEDY), Client())
    engine.scheduler.admit()
    assert alone > 2 * make_plan(engine).draft_tokens.get(decoding.id, 0)


def planned(token_s: float, accepted: int, batch: int = 1) -> Engine:
    """Return an engine that has planned for `batch` sequences.

    A draft token makes a forward `token_s` seconds longer. So far, `accepted` tokens of each draft
    of 8 were right.
    """
    engine, _ = make_engine(eos_bias=-99, page_count=256, config=EngineConfig(DraftTokensPolicy()))
    ScriptedDrafter(engine)
    for size in (1, batch):
        for drafted in (0, 8):
            engine.cost.calibrate(size, size * (1 + drafted), 0.05 + token_s * size * drafted)
    for _ in range(batch):
        engine.submit(TokenRequest([1, 2], 100, GREEDY), Client())
    for sequence in engine.sequences.values():
        for assignment in sequence.assignments.values():
            assignment.asked = True
            for _ in range(30):
                assignment.rate.observe(8, accepted)
    engine.step()
    make_plan(engine, 5)
    return engine


def draft_tokens(engine: Engine) -> list[int]:
    """Return each sequence's number of draft tokens in the last plan."""
    planned = engine.drafting.plan.draft_tokens
    return [planned.get(sequence_id, 0) for sequence_id in engine.sequences]


def test_a_free_draft_token_is_taken_and_an_expensive_one_is_not() -> None:
    assert draft_tokens(planned(0.0001, accepted=8)) == [8]
    assert draft_tokens(planned(0.0040, accepted=3)) == [3]
    assert draft_tokens(planned(0.0500, accepted=0)) == [0]


def kneed(rates: Mapping[str, Sequence[float]], max_draft_tokens: int = 64) -> Engine:
    """Return an engine with eight sequences.

    `rates` maps a drafter's name to its acceptance probability for each sequence. A forward of 16
    tokens takes little longer than a forward of 8; each further token takes 2 ms.
    """
    engine, _ = make_engine(eos_bias=-99, page_count=256, config=EngineConfig(DraftTokensPolicy()))
    for name in rates:
        ScriptedDrafter(engine, name, name, max_draft_tokens=max_draft_tokens).prove()
    for drafted, seconds in ((0, 0.030), (1, 0.036), (3, 0.068), (6, 0.116)):
        engine.cost.calibrate(8, 8 * (1 + drafted), seconds)
    for _ in range(8):
        engine.submit(TokenRequest([1, 2], 100, GREEDY), Client())
    engine.step()
    for i, sequence in enumerate(engine.sequences.values()):
        for name, assignment in sequence.assignments.items():
            assignment.asked = True
            assignment.rate = AcceptanceRate(float(rates[name][i]), 8)
    return engine


def settle(engine: Engine) -> list[int]:
    """Return each sequence's number of draft tokens after seven plans.

    Each plan decides which drafters are asked.
    """
    for _ in range(7):
        plan = make_plan(engine)
        for sequence in engine.sequences.values():
            for assignment in sequence.assignments.values():
                assignment.asked = assignment in plan.asks
    return draft_tokens(engine)


def is_asked(engine: Engine, sequence_id: int, drafter_id: str = "scripted") -> bool:
    """Return whether the last plan asks this drafter for this sequence."""
    return engine.sequences[sequence_id].assignments[drafter_id] in engine.drafting.plan.asks


def test_places_go_to_the_likeliest_tokens_of_all_sequences() -> None:
    first, *_, last = settle(kneed({"one": [0.9, 0.9, 0.9, 0.8, 0.2, 0.2, 0.1, 0.1]}))
    assert first >= 2
    assert last == 0


def test_a_request_gets_the_draft_tokens_that_it_asks_for() -> None:
    engine = planned(0.0001, accepted=8)
    request = TokenRequest([1, 2], 100, GREEDY, speculation=SpeculationOptions(draft_tokens=5))
    sequence = engine.submit(request, Client())
    make_plan(engine)
    [assignment] = sequence.assignments.values()
    assert assignment.draft_tokens == 5


def test_a_drafter_on_the_targets_own_cores_does_not_run_ahead() -> None:
    engine, _ = make_engine(config=EngineConfig(DraftTokensPolicy("fixed", 4)))
    engine.drafting._target_device = TargetDevice(frozenset({0, 1}))
    own_host = Placement(host=platform.node(), device="cpu")
    here = ScriptedDrafter(engine, "here", "here", placement=own_host)
    elsewhere = Placement(host="elsewhere", device="cpu")
    there = ScriptedDrafter(engine, "there", "there", placement=elsewhere)
    engine.submit(TokenRequest([1, 2], 40, GREEDY), Client())
    engine.drain_inbox()
    assert here.received[0].opened[0].window.depth == 4
    assert there.received[0].opened[0].window.depth == 9


@pytest.mark.parametrize(
    ("device", "gpu_uuid", "depth"),
    [
        # A drafter's container may have a host name and numbers of GPUs of its own.
        ("cuda:1", "GPU-a", 4),
        ("cuda:0", "GPU-b", 9),
        ("cuda:0", "", 9),
        ("cpu", "", 9),
    ],
    ids=["the target's GPU", "another GPU", "a GPU without a name", "a CPU"],
)
def test_only_a_drafter_on_the_targets_own_gpu_waits_for_the_verdict_before_it_drafts(
    device: str, gpu_uuid: str, depth: int
) -> None:
    engine, _ = make_engine(config=EngineConfig(DraftTokensPolicy("fixed", 4)))
    engine.drafting._target_device = TargetDevice(gpu_uuids=frozenset({"GPU-a"}))
    place = Placement(host="a container", device=device, gpu_uuid=gpu_uuid)
    drafter = ScriptedDrafter(engine, placement=place)
    engine.submit(TokenRequest([1, 2], 40, GREEDY), Client())
    engine.drain_inbox()
    assert drafter.handle.on_target_device is (depth == 4)
    assert drafter.received[0].opened[0].window.depth == depth


def test_a_new_drafter_on_the_targets_gpu_is_asked_like_a_proven_one() -> None:
    """Nobody waits for a drafter on trial, so its speed on a free GPU would stay unknown."""
    engine, _ = make_engine(config=EngineConfig(DraftTokensPolicy("auto", 4)))
    engine.drafting._target_device = TargetDevice(gpu_uuids=frozenset({"GPU-a"}))
    proven = ScriptedDrafter(engine, "proven", "proven").handle
    proven.proven = True
    new = [
        ScriptedDrafter(engine, name, name, placement=Placement(device="cuda:0", gpu_uuid=gpu))
        for name, gpu in (("here", "GPU-a"), ("elsewhere", "GPU-b"))
    ]
    here, elsewhere = (drafter.handle for drafter in new)
    asked = engine.planner._credible(frozenset([proven, here, elsewhere]))
    assert asked == {proven, here}


def test_a_drafter_runs_ahead_by_a_draft_a_step_for_a_round_trip() -> None:
    engine, _ = make_engine(config=EngineConfig(DraftTokensPolicy("fixed", 8)))
    drafter = ScriptedDrafter(engine)
    sequence = engine.submit(TokenRequest([1, 2], 40, GREEDY), Client())
    [assignment] = sequence.assignments.values()
    assert run_ahead_window(assignment, 1, step_s=0.05).depth == 3
    drafter.handle.round_trip.observe(0.08)
    depths = [run_ahead_window(assignment, count, step_s=0.05).depth for count in (1, 2, 8)]
    assert depths == [7, 11, assignment.trie.window.depth]


def mixed(good: int, poor: int) -> tuple[Engine, ScriptedDrafter]:
    """Return an engine with `good` and `poor` sequences, and a drafter on the target's cores.

    Each draft for a good sequence has 5 accepted tokens; every tenth draft for a poor sequence has
    one. A forward takes 50 ms, and a draft of 8 tokens takes the target's cores for 60 ms.
    """
    engine, _ = make_engine(eos_bias=-99, page_count=256, config=EngineConfig(DraftTokensPolicy()))
    drafter = ScriptedDrafter(engine)
    for size in (1, 8):
        for drafted in (0, 8):
            engine.cost.calibrate(size, size * (1 + drafted), 0.05 + 0.0001 * size * drafted)
    for _ in range(good + poor):
        engine.submit(TokenRequest([1, 2], 100, GREEDY), Client())
    for i, sequence in enumerate(engine.sequences.values()):
        for assignment in sequence.assignments.values():
            assignment.asked = True
            for turn in range(60):
                hits = 5 if i < good else int(turn % 10 == 1)
                assignment.rate.observe(8, hits)
    engine.step()
    drafter.handle.on_target_device = True
    drafter.handle.token_time.observe(0.06 / 8)
    make_plan(engine, 5)
    return engine, drafter


def test_a_paused_drafter_is_asked_once_drafting_pays_for_the_batch() -> None:
    engine, drafter = mixed(good=1, poor=7)
    good, *poor = engine.sequences.values()
    assignment = good.assignments["scripted"]
    for _ in range(3):
        engine.step()
        assert not assignment.asked
    for sequence in poor:
        engine.cancel(sequence)
    missed_from = assignment.sent_length
    engine.step()
    assert assignment.asked
    verdict = drafter.received[-1].verdicts[0]
    assert verdict.new_token_ids == good.tokens[missed_from:]
    assert len(verdict.new_token_ids) > 1
    assert verdict.committed_length == len(good.tokens)


def test_a_slow_drafter_pays_on_cores_of_its_own_and_is_not_waited_for() -> None:
    def pays(on_target_device: bool) -> bool:
        engine, drafter = mixed(good=1, poor=0)
        [sequence] = engine.sequences.values()
        drafter.handle.on_target_device = on_target_device
        draft_s = 0.5 if on_target_device else 0.25
        for _ in range(9):
            drafter.handle.token_time.observe(draft_s / 8)
        for _ in range(5):
            make_plan(engine)
        assert engine.drafting.plan.wait_for == ()
        return is_asked(engine, sequence.id)

    assert not pays(on_target_device=True)
    assert pays(on_target_device=False)
