"""Verdicts leave after a step, chunks with the next forward, or at once if no forward follows."""

from collections.abc import Callable, Sequence

import pytest
import torch

from outrider.errors import OutriderError, Reason
from outrider.lm.runner import SequenceSlice
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import TokenChunk, TokenRequest
from tests.fake_device import DEVICE, FakeDevice
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, make_engine
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.outbox import Delivery
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.verification.batch import DraftVerifier, Verify


def test_verdicts_leave_at_once_and_chunks_with_the_next_forward() -> None:
    engine, model = make_engine(eos_bias=-99)
    drafter, client = ScriptedDrafter(engine), Client()
    engine.submit(TokenRequest([1, 2], 8, GREEDY), client)
    known_at_forward: list[int] = []
    model.broken = lambda slices: known_at_forward.append(len(client.tokens))
    engine.step()
    assert drafter.received[-1].verdicts[0].new_token_ids == model.greedy([1, 2], 1)
    assert client.tokens == []
    engine.step()
    engine.step()
    assert known_at_forward == [0, 1, 2]


@pytest.mark.parametrize("launches", [True, False], ids=["GPU", "CPU"])
def test_what_no_step_waits_for_is_done_while_a_gpu_computes(
    launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    lay_out = DraftVerifier.lay_out

    def laid_out(self: DraftVerifier, batch: Sequence[ScheduledSequence]) -> Verify:
        events.append("layout")
        return lay_out(self, batch)

    monkeypatch.setattr(DraftVerifier, "lay_out", laid_out)

    def deliver(deliveries: list[Delivery]) -> None:
        for sink, message in deliveries:
            events.append("chunk" if isinstance(message, TokenChunk) else "verdict")
            sink(message)

    verifier = DraftVerifier(device=DEVICE) if launches else DraftVerifier()
    engine, model = make_engine(
        eos_bias=-99, deliver=deliver, draft_verifier=verifier, launches=launches
    )
    ScriptedDrafter(engine)
    compute = model.forward
    metrics = engine._metrics
    flush = metrics.flush

    def forward(slices: Sequence[SequenceSlice]) -> torch.Tensor:
        events.append("launch")
        logits = compute(slices)
        return device.put(logits) if launches else logits

    model.forward = forward  # type: ignore[method-assign]

    def flushed() -> None:
        events.append("metrics")
        flush()

    metrics.flush = flushed  # type: ignore[method-assign]
    client = Client()
    engine.submit(TokenRequest([1, 2], 4, GREEDY), client)
    with FakeDevice(lambda: events.append("wait")) as device:
        engine.advance()
        events.clear()
        engine.advance()
        engine.advance()
        two_steps = list(events)
        engine.advance()
    step = ["metrics", "chunk", "launch", "layout", "verdict"]
    if launches:
        step = ["launch", "layout", "chunk", "metrics", "wait", "verdict"]
    assert two_steps == step * 2
    # No forward follows the last step.
    assert events[-2:] == ["metrics", "chunk"]
    assert client.tokens == model.greedy([1, 2], 4)


def test_drafts_are_counted_while_a_gpu_computes() -> None:
    events: list[str] = []

    def deliver(deliveries: list[Delivery]) -> None:
        for sink, message in deliveries:
            events.append("chunk" if isinstance(message, TokenChunk) else "verdict")
            sink(message)

    config = EngineConfig(DraftTokensPolicy("fixed", 2))
    engine, model = make_engine(
        eos_bias=-99, config=config, deliver=deliver, launches=True, always_draft=True
    )
    drafter, client = ScriptedDrafter(engine), Client()
    sequence = engine.submit(TokenRequest([1, 2], 9, GREEDY), client)
    engine.step()
    rate = sequence.assignments["scripted"].rate
    text = model.greedy([1, 2], 9)
    drafter.propose(sequence.id, text[1:3])
    engine.step()
    assert drafter.received[-1].verdicts[0].matched_token_count == 2
    # The drafter knows four tokens. The client has only the first, and no draft is counted yet.
    assert (drafter.handle.verified_count, client.tokens) == (0, text[:1])
    before = rate.version
    model.broken = lambda slices: events.append(f"launch {drafter.handle.verified_count}")
    events.clear()
    engine.step()
    assert events == ["launch 0", "chunk", "verdict"]
    assert (drafter.handle.verified_count, client.tokens) == (2, text[:4])
    assert rate.version > before


def test_an_error_comes_after_all_tokens_that_were_committed_before_it() -> None:
    engine, model = make_engine(eos_bias=-99, launches=True)
    received: list[TokenChunk | OutriderError] = []
    sequence = engine.submit(TokenRequest([1, 2], 8, GREEDY), received.append)
    engine.step()
    error = OutriderError(Reason.INTERNAL, "planted")
    engine._endings.fail(sequence, error)
    engine.advance()
    chunk, last = received
    assert isinstance(chunk, TokenChunk)
    assert (chunk.token_ids, last) == (model.greedy([1, 2], 1), error)


def test_a_gpus_next_step_is_planned_while_it_computes_unless_drafters_or_the_batch_change() -> (
    None
):
    engine, _ = make_engine(eos_bias=-99, launches=True, always_draft=True)
    wait = engine._wait
    drafter = ScriptedDrafter(engine)
    sequences = [engine.submit(TokenRequest([1, n], 40, GREEDY), Client()) for n in range(8)]

    def two_end() -> None:
        for sequence in sequences[1:3]:
            engine.cancel(sequence)

    def is_used(change: Callable[[], object] = lambda: None) -> bool:
        """Return whether the engine uses a plan made during a step if `change` follows the step."""
        engine.step()
        outline = wait._outline
        assert outline is not None
        change()
        return wait.take_plan().asks is outline.plan.asks

    engine.step()
    assert wait._outline is None  # the prompts were read
    assert is_used()
    assert is_used(lambda: engine.cancel(sequences[0]))
    assert not is_used(two_end)
    assert not is_used(lambda: ScriptedDrafter(engine, "second", "second"))
    assert not is_used(lambda: engine.drafting.leave(drafter.handle))
    assert not is_used(lambda: engine.submit(TokenRequest([1, 9], 40, GREEDY), Client()))


def test_without_a_next_forward_chunks_leave_at_once() -> None:
    engine, model = make_engine(eos_bias=-99)
    short = Client()
    long = Client()
    engine.submit(TokenRequest([1, 2], 1, GREEDY), short)
    waited_for = engine.submit(TokenRequest([1], 9, GREEDY), long)
    engine.step()
    assert short.tokens == []
    engine.cancel(waited_for)
    engine.step()
    assert short.tokens == model.greedy([1, 2], 1)
    last = Client()
    engine.submit(TokenRequest([3], 1, GREEDY), last)
    engine.step()
    assert last.tokens == model.greedy([3], 1)


def test_a_failed_engine_delivers_all_committed_tokens() -> None:
    engine, model = make_engine(eos_bias=-99)
    client = Client()
    engine.submit(TokenRequest([1, 2], 8, GREEDY), client)
    engine.step()
    engine.post(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.run()
    assert client.tokens == model.greedy([1, 2], 1)
