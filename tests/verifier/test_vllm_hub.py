"""The hub behind vLLM's scheduler, driven by the tests' own steps without vLLM."""

from __future__ import annotations

import platform

import pytest

from outrider.errors import OutriderError
from outrider.process.observability.telemetry import NO_SPAN
from outrider.protocol.draft_messages import (
    DraftBatch,
    FeatureRequest,
    Hello,
    Opened,
    Proposal,
    Skip,
    StepBatch,
    Verdict,
)
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import PauseReason, SamplingParams, TokenRequest
from outrider.protocol.model_info import Placement
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.occupancy import Occupancy
from verifier_svc.state.target_device import NO_DEVICE, TargetDevice
from verifier_svc.vllm.hub import DraftHub, Limits
from verifier_svc.vllm.outcome import Outcome, StepStates

NOBODY = Occupancy()


class Clock:
    """Time that passes only when the hub waits."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


class TestHub(DraftHub):
    """A hub whose drafters answer while it waits."""

    __test__ = False

    def __init__(
        self, target_device: TargetDevice = NO_DEVICE, states: StepStates | None = None
    ) -> None:
        self.time = Clock()
        self.messages: list[tuple[Drafter, DraftBatch]] = []
        super().__init__(
            Limits(vocab_size=100, max_sequences=4),
            DraftTokensPolicy("fixed", 4),
            VerifierMetrics("m"),
            self._deliver,
            EVERY_DRAFT,
            self.time,
            target_device=target_device,
            states=states,
        )
        self.drafter: Drafter | None = None
        self.told: list[StepBatch | OutriderError] = []
        self.right = list(range(10, 60))
        """The target's text after each prompt."""
        self.answers = True
        self.lengths: dict[int, int] = {}
        self.closed: list[int] = []

    def _deliver(self, deliveries: list) -> None:  # type: ignore[type-arg]
        for sink, message in deliveries:
            sink(message)

    def add_drafter(self, feature_request: FeatureRequest | None = None) -> None:
        place = Placement(host=platform.node())
        hello = Hello("d", "test", "f", 8, placement=place, feature_request=feature_request)
        self.drafter = self.drafting.join(hello, self._hear)

    def _hear(self, message: StepBatch | OutriderError) -> None:
        self.told.append(message)
        if isinstance(message, OutriderError):
            return
        for opened in message.opened:
            self.lengths[opened.sequence_id] = len(opened.token_ids)
        for verdict in message.verdicts:
            self.lengths[verdict.sequence_id] = verdict.committed_length
        self.closed += [closed.sequence_id for closed in message.closed]
        for each in self.closed:
            self.lengths.pop(each, None)

    def pause(self, seconds: float) -> None:
        self.outbox.send_to_drafters()
        self.time.now += min(seconds, 0.002)
        if not self.answers or self.drafter is None:
            return
        batch = DraftBatch()
        for sequence_id, length in self.lengths.items():
            prompt = len(self.sequences[sequence_id].request.prompt)
            guess = self.right[length - prompt : length - prompt + 4]
            proposal = Proposal(sequence_id, length, guess)
            batch.proposals.append(proposal) if guess else batch.skips.append(
                Skip(sequence_id, length)
            )
        self.drafting.on_drafts(self.drafter, batch)


def opened(hub: DraftHub, name: str, prompt_length: int = 5, max_tokens: int = 40) -> None:
    request = TokenRequest(
        [1] * prompt_length, max_tokens, SamplingParams(temperature=0.0), ignore_eos=True
    )
    hub.open(name, hub.new_sequence(request, lambda _: None, NO_SPAN, ()))


def step(hub: DraftHub, name: str, computed: int, tokens: int, text: list[int]) -> list[int]:
    """Run a step of a request; return the committed tokens.

    The step computes `tokens` tokens besides the draft; the target's text goes on with `text`.
    """
    hub.plan_step([(name, computed)] if computed else [])
    draft = hub.choose(name, 4) if tokens == 1 else []
    drafts = {name: draft} if draft else {}
    hub.begin({name: tokens + len(draft)}, drafts, {name: computed})
    hub.computed()
    right = 0
    while right < min(len(draft), len(text)) and draft[right] == text[right]:
        right += 1
    committed = text[: right + 1]
    hub.commit([Outcome(name, draft, committed)], NOBODY)
    return committed


@pytest.fixture
def hub() -> TestHub:
    return TestHub()


@pytest.fixture
def begun(hub: TestHub) -> TestHub:
    """Return a hub with a drafter, and with a request that has one token of output."""
    hub.add_drafter()
    opened(hub, "a")
    step(hub, "a", 0, 5, hub.right)
    return hub


def compute(
    hub: TestHub, tokens: int, *committed: int, draft: list[int] | None = None, pages: float = 0.0
) -> None:
    """Run a step for which vLLM does not ask the hub for drafts."""
    hub.plan_step([])
    [sequence] = hub.sequences.values()
    drafts = {"a": draft} if draft else {}
    hub.begin({"a": tokens}, drafts, {"a": sequence.kv.num_computed_tokens})
    hub.computed()
    hub.commit([Outcome("a", [], list(committed))], Occupancy(pages=pages))


def windows(hub: TestHub) -> set[int]:
    """Return the depths of the windows that the drafter got while a request ran."""
    hub.add_drafter()
    opened(hub, "a")
    step(hub, "a", 0, 5, hub.right)
    step(hub, "a", 5, 1, hub.right[1:])
    step(hub, "a", 10, 1, hub.right[6:])
    batches = [message for message in hub.told if isinstance(message, StepBatch)]
    asked: list[Opened | Verdict] = []
    for batch in batches:
        asked += [*batch.opened, *batch.verdicts]
    told = [each.window for each in asked]
    return {window.depth for window in told if window is not None}


def test_a_drafter_runs_ahead_except_on_the_cores_that_vllm_computes_on() -> None:
    assert max(windows(TestHub())) > 4
    assert max(windows(TestHub(TargetDevice(frozenset({0}))))) == 4


def test_a_right_draft_is_verified_and_counted(hub: TestHub) -> None:
    hub.add_drafter()
    opened(hub, "a")
    assert step(hub, "a", 0, 5, hub.right) == [10]
    assert step(hub, "a", 5, 1, hub.right[1:]) == [11, 12, 13, 14, 15]
    [sequence] = hub.sequences.values()
    assert sequence.tokens[5:] == [10, 11, 12, 13, 14, 15]
    assert (sequence.stats.draft_token_count, sequence.stats.accepted_token_count) == (4, 4)
    judged = hub.judged[sequence.id]
    assert (judged.drafted, judged.accepted) == (4, 4)


def test_a_prompt_in_chunks_commits_only_behind_its_last_chunk(hub: TestHub) -> None:
    hub.add_drafter()
    opened(hub, "a", prompt_length=9)
    compute(hub, 4)
    [sequence] = hub.sequences.values()
    assert sequence.stats.forward_count == 0
    assert step(hub, "a", 4, 5, hub.right) == [10]
    assert sequence.stats.forward_count == 1


def test_the_load_has_vllms_use_of_the_kv_cache(hub: TestHub) -> None:
    opened(hub, "a")
    compute(hub, 5, 10, pages=0.25)
    assert hub.load().kv_cache_usage == 0.25
    hub.go_idle()
    assert hub.load().kv_cache_usage == 0.0


def test_a_padded_row_is_no_draft(hub: TestHub) -> None:
    """If a step has only the last token of a prompt, vLLM pads the row with ids of -1."""
    hub.add_drafter()
    opened(hub, "a")
    compute(hub, 5 + 4, 10, draft=[-1] * 4)
    [sequence] = hub.sequences.values()
    assert sequence.stats.draft_count == 0
    assert sequence.tokens[-1] == 10


def test_the_ids_of_a_padded_row_count_in_no_measure(
    begun: TestHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids count neither as draft tokens nor as tokens of a prompt."""
    seen: list[tuple[int, int, int]] = []

    def observe(decoding: int, tokens: int, seconds: float, prompt_tokens: int) -> None:
        seen.append((decoding, tokens, prompt_tokens))

    monkeypatch.setattr(begun.cost, "observe", observe)
    compute(begun, 1 + 4, 11, draft=[-1] * 4)
    compute(begun, 1, 12)
    assert seen == [(1, 1, 0)] * 2


def test_a_stop_inside_an_accepted_run_counts_what_was_committed(begun: TestHub) -> None:
    [sequence] = begun.sequences.values()
    begun.plan_step([("a", 5)])
    draft = begun.choose("a", 4)
    begun.begin({"a": 5}, {"a": draft}, {"a": 5})
    begun.computed()
    begun.close("a")  # vLLM frees the request while it commits the step
    assert sequence.id in begun.sequences
    begun.commit([Outcome("a", draft, draft[:2])], NOBODY)
    assert sequence.stats.accepted_token_count == 2
    assert not begun.sequences
    assert begun.closed == [sequence.id]


def test_a_silent_drafter_is_waited_for_at_most_a_second(hub: TestHub) -> None:
    hub.add_drafter()
    hub.answers = False
    opened(hub, "a")
    step(hub, "a", 0, 5, hub.right)
    before = hub.time.now
    assert step(hub, "a", 5, 1, hub.right[1:]) == [11]
    assert 0.0 < hub.time.now - before <= 1.01


def test_without_drafters_no_step_waits_and_the_pause_has_its_reason(hub: TestHub) -> None:
    opened(hub, "a")
    step(hub, "a", 0, 5, hub.right)
    before = hub.time.now
    step(hub, "a", 5, 1, hub.right[1:])
    assert hub.time.now == before
    [sequence] = hub.sequences.values()
    assert sequence.pauses == {PauseReason.NO_DRAFTER: 1}


def test_a_fault_of_ours_ends_the_drafters_streams_alone(hub: TestHub) -> None:
    hub.add_drafter()
    opened(hub, "a")
    hub.give_up()
    assert isinstance(hub.told[-1], OutriderError)
    assert hub.sequences
    assert not hub.drafting.roster.connected
