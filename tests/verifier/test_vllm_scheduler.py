"""Our part of vLLM's scheduler and engine, driven without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.errors import OutriderError, Reason
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.protocol import messages
from outrider.protocol.messages import FinishReason, TokenChunk, TokenRequest, TokenSource
from tests.verifier.fake_vllm import Request, SamplingParams, installed
from tests.verifier.test_vllm_hub import TestHub
from verifier_svc.vllm import parameters
from verifier_svc.vllm.engine import VllmEngine

PROMPT = [1] * 5


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    with installed():
        yield


@pytest.fixture
def hub() -> TestHub:
    return TestHub()


def scheduler_of(hub: TestHub, *, is_own: bool = True, **settings: Any) -> Any:
    """Return our scheduler in front of the hub."""
    from verifier_svc.vllm.scheduler import DraftingMixin

    class Ours(DraftingMixin):
        def _make_hub(self) -> TestHub:
            return hub

    hub.is_own = is_own  # type: ignore[misc]
    return Ours(**settings)


def step(scheduler: Any, right: list[int]) -> dict[str, list[int]]:
    """Run a step whose target writes `right` after each prompt; return the verified drafts."""
    output = scheduler.schedule()
    sampled = {}
    for name in output.num_scheduled_tokens:
        request = scheduler.requests[name]
        rest = right[request.num_output_tokens :]
        draft = output.scheduled_spec_decode_tokens.get(name, [])
        count = 0
        while count < len(draft) and draft[count] == rest[count]:
            count += 1
        sampled[name] = rest[: count + 1]
    scheduler.update_from_output(output, sampled)
    drafts: dict[str, list[int]] = output.scheduled_spec_decode_tokens
    return drafts


def asked(name: str, max_tokens: int = 30) -> Request:
    return Request(name, list(PROMPT), SamplingParams(max_tokens=max_tokens, extra_args=None))


def test_drafts_change_no_text_and_save_steps(hub: TestHub) -> None:
    hub.add_drafter()
    scheduler = scheduler_of(hub)
    request = asked("a")
    scheduler.add_request(request)
    steps = 0
    while not request.is_finished():
        step(scheduler, hub.right)
        steps += 1
    assert request.output_token_ids == hub.right[:30]
    assert steps <= 8
    assert not hub.sequences
    assert len(hub.closed) == 1


def test_a_draft_never_passes_the_end_of_the_request_or_the_context(hub: TestHub) -> None:
    hub.add_drafter()
    for limit in ("max_tokens", "max_model_len"):
        scheduler = scheduler_of(hub)
        request = asked("a", 9 if limit == "max_tokens" else 90)
        if limit == "max_model_len":
            scheduler.max_model_len = 5 + 9
        scheduler.add_request(request)
        while request.num_output_tokens < 9:
            drafts = step(scheduler, hub.right).get("a", [])
            assert len(drafts) + 1 <= 9 - (request.num_output_tokens - len(drafts) - 1)
            assert request.num_output_tokens <= 9
        if not request.is_finished():
            scheduler.finish_requests("a")


@pytest.mark.parametrize("wrong", [-1, 100, 2**40])
def test_a_draft_with_an_id_beyond_the_vocabulary_costs_that_draft_alone(
    hub: TestHub, wrong: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add_drafter()
    scheduler = scheduler_of(hub)
    for name in ("a", "b"):
        scheduler.add_request(asked(name))
    step(scheduler, hub.right)
    choose = hub.choose
    spoilt: list[str] = []

    def spoil(name: str, room: int) -> list[int]:
        tokens = choose(name, room)
        if name == "a" and len(spoilt) < 2 and tokens:
            spoilt.append(name)
            return [*tokens[:-1], wrong]
        return tokens

    monkeypatch.setattr(hub, "choose", spoil)
    for count in (1, 2):
        assert set(step(scheduler, hub.right)) == {"b"}
        assert hub.bad_draft_count == count
    assert set(step(scheduler, hub.right)) == {"a", "b"}
    assert not hub.failed
    assert scheduler.requests["a"].output_token_ids == hub.right[:8]
    assert "ids that are none" in caplog.text


def test_drafts_get_only_pages_that_nobody_else_needs(hub: TestHub) -> None:
    """A prompt of five tokens takes two blocks of four; the first draft would need a third."""
    hub.add_drafter()
    for blocks, drafted in ((2, 2), (3, 4)):
        scheduler = scheduler_of(hub, blocks=blocks)
        scheduler.add_request(asked("a", 20))
        step(scheduler, hub.right)
        assert len(step(scheduler, hub.right).get("a", [])) == drafted
        scheduler.finish_requests("a")


def test_an_aborted_request_is_closed_at_its_drafters(hub: TestHub) -> None:
    hub.add_drafter()
    scheduler = scheduler_of(hub)
    scheduler.add_request(asked("a"))
    step(scheduler, hub.right)
    [number] = hub.sequences
    scheduler.finish_requests("a")
    hub.plan_step([])
    assert hub.closed == [number]
    assert not hub.sequences


def test_a_preempted_request_is_counted_and_drafted_again(hub: TestHub) -> None:
    hub.add_drafter()
    scheduler = scheduler_of(hub)
    request = asked("a")
    scheduler.add_request(request)
    step(scheduler, hub.right)
    scheduler.preempt("a")
    assert (len(hub.running), len(hub.waiting), hub.preemption_count) == (0, 1, 1)
    assert step(scheduler, hub.right) == {}, "the prompt is computed again"
    assert step(scheduler, hub.right) == {"a": hub.right[2:6]}
    assert request.output_token_ids == hub.right[:7]


def test_a_prompt_in_chunks_and_tokens_in_flight_get_no_draft(hub: TestHub) -> None:
    hub.add_drafter()
    scheduler = scheduler_of(hub)
    request = asked("a")
    scheduler.add_request(request)
    step(scheduler, hub.right)
    for name in ("is_prefill_chunk", "num_in_flight_tokens", "num_output_placeholders"):
        setattr(request, name, 1)
        assert step(scheduler, hub.right) == {}
        setattr(request, name, 0)
    assert len(step(scheduler, hub.right)["a"]) == 4


def test_another_servers_request_cannot_name_one_of_our_sequences(hub: TestHub) -> None:
    """If it could, it might write into a client's text. vLLM's cache salt names the tenant."""
    for is_own in (True, False):
        own = TestHub()
        scheduler = scheduler_of(own, is_own=is_own)
        request = TokenRequest([1] * 5, 40, ignore_eos=True)
        mine = own.new_sequence(request, lambda _: None, SPAN, ())
        parameters = SamplingParams(max_tokens=9, extra_args={"outrider": {"sequence_id": mine.id}})
        scheduler.add_request(Request("a", [2] * 5, parameters, "tenant"))
        others = [each for each in own.sequences.values() if each is not mine]
        assert len(others) == (0 if is_own else 1)
        assert {each.request.tenant for each in others} <= {"tenant"}


def test_drafts_need_a_pipeline_of_one_stage(hub: TestHub) -> None:
    with pytest.raises(OutriderError) as refused:
        scheduler_of(hub, pipeline_parallel_size=2)
    assert refused.value.field == "pipeline_parallel_size"


SPAN = SimpleNamespace(traceparent="", set=lambda **_: None, end=lambda: None)


class Llm:
    """A small version of vLLM's engine: our scheduler, and a target that writes a known text."""

    def __init__(self, scheduler: Any, hub: TestHub) -> None:
        self.scheduler, self.hub = scheduler, hub
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=4)
        )
        self.aborted: list[str] = []
        self.asked: dict[str, SamplingParams] = {}

    def add_request(self, name: str, prompt: Any, parameters: SamplingParams) -> None:
        if parameters.max_tokens > 1000:
            raise ValueError("too long")
        self.asked[name] = parameters
        salt = prompt.get("cache_salt")
        self.scheduler.add_request(Request(name, prompt["prompt_token_ids"], parameters, salt))

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.aborted.append(name)
            self.scheduler.finish_requests(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self.scheduler.requests)

    def step(self) -> list[Any]:
        before = {each: r.num_output_tokens for each, r in self.scheduler.requests.items()}
        requests = dict(self.scheduler.requests)
        # A request's tokens continue its text from the place that its prompt reached.
        done = {each: len(r.prompt_token_ids) - 5 for each, r in requests.items()}
        output = self.scheduler.schedule()
        sampled = {}
        for name in output.num_scheduled_tokens:
            rest = self.hub.right[done[name] + requests[name].num_output_tokens :]
            draft = output.scheduled_spec_decode_tokens.get(name, [])
            count = 0
            while count < len(draft) and draft[count] == rest[count]:
                count += 1
            sampled[name] = rest[: count + 1]
        self.scheduler.update_from_output(output, sampled)
        return [
            SimpleNamespace(
                request_id=name,
                finished=request.is_finished(),
                num_cached_tokens=0,
                prompt_logprobs=None,
                outputs=[
                    SimpleNamespace(
                        token_ids=request.output_token_ids[before[name] :],
                        finish_reason=request.finish_reason,
                        logprobs=None,
                    )
                ],
            )
            for name, request in requests.items()
        ]


@pytest.fixture
def engine(hub: TestHub) -> VllmEngine:
    hub.add_drafter()
    llm: Any = Llm(scheduler_of(hub), hub)
    return VllmEngine(llm, hub, (0,))


def submitted(engine: VllmEngine, max_tokens: int = 20, **fields: Any) -> tuple[Any, list[Any]]:
    got: list[Any] = []
    sampling = messages.SamplingParams(temperature=0.0)
    ignore = "grammar" not in fields
    request = TokenRequest(list(PROMPT), max_tokens, sampling, ignore_eos=ignore, **fields)
    return engine.submit(request, got.append), got


def tokens_of(got: list[Any]) -> list[int]:
    assert all(isinstance(each, TokenChunk) for each in got), got
    return [token for chunk in got for token in chunk.token_ids]


def finish(engine: VllmEngine) -> None:
    while engine._llm.has_unfinished_requests():
        engine.step()


def test_a_client_gets_each_token_once_with_its_source(engine: VllmEngine, hub: TestHub) -> None:
    _, got = submitted(engine)
    finish(engine)
    assert tokens_of(got) == hub.right[:20]
    assert got[-1].finish_reason is FinishReason.LENGTH
    assert got[-1].stats.accepted_token_count > 10
    for chunk in got:
        accepted = chunk.sources.count(TokenSource.ACCEPTED)
        assert accepted in (len(chunk.token_ids), len(chunk.token_ids) - 1)
        own = TokenSource.BONUS if chunk.draft_token_count else TokenSource.PLAIN
        assert chunk.sources[accepted:] in ([], [own])


def test_an_answer_that_is_read_again_goes_on_where_it_was(
    engine: VllmEngine, hub: TestHub
) -> None:
    sequence, got = submitted(engine)
    for _ in range(2):
        engine.step()
    before = sequence.id
    engine.pause(sequence)
    assert not engine._llm.has_unfinished_requests()
    assert before not in hub.sequences
    engine.resume(sequence)
    assert sequence.id != before, "a drafter may be told of an id only once"
    finish(engine)
    engine.resume(sequence)
    assert tokens_of(got) == hub.right[:20]
    assert sequence.stats.accepted_token_count > 10


def test_an_answer_with_a_grammar_is_not_paused(engine: VllmEngine, hub: TestHub) -> None:
    sequence, got = submitted(engine, grammar=Grammar(GrammarKind.REGEX, "a+"))
    engine.step()
    engine.pause(sequence)
    finish(engine)
    assert tokens_of(got) == hub.right[:20]


def test_a_cancelled_request_leaves_vllm_and_the_hub(engine: VllmEngine, hub: TestHub) -> None:
    sequence, got = submitted(engine)
    engine.step()
    engine.cancel(sequence)
    assert not engine._llm.has_unfinished_requests()
    assert not hub.sequences
    engine.cancel(sequence)
    assert len(tokens_of(got)) <= 1


def test_a_request_that_vllm_refuses_keeps_no_place(engine: VllmEngine, hub: TestHub) -> None:
    with pytest.raises(OutriderError, match="too long") as refused:
        submitted(engine, 5000)
    assert refused.value.reason is Reason.INVALID_VALUE
    assert not hub.sequences
    assert not hub.waiting


def test_tenants_share_no_cached_prefix(engine: VllmEngine) -> None:
    submitted(engine, tenant="a")
    submitted(engine)
    llm: Any = engine._llm
    requests = llm.scheduler.requests.values()
    assert [each.cache_salt for each in requests] == ["a", None]


def test_what_vllm_is_asked_for_is_what_the_request_says(engine: VllmEngine, hub: TestHub) -> None:
    sampling = messages.SamplingParams(0.7, top_k=5, min_tokens=3, seed=11, logit_bias=((4, 1.5),))
    request = TokenRequest(
        [1] * 5,
        20,
        sampling,
        stop_token_ids=frozenset({9}),
        committed=[10, 11],
        top_logprobs=2,
    )
    sequence = hub.new_sequence(request, lambda _: None, SPAN, (0,))
    found: Any = parameters.vllm_parameters(sequence)
    assert (found.temperature, found.max_tokens, found.logprobs) == (0.0, 18, 2)
    assert (found.stop_token_ids, found.ignore_eos) == ([0, 9], True)
    drawing = parameters.drawing_of(found)
    assert drawing is not None
    assert drawing.sampling == messages.SamplingParams(
        0.7, top_k=5, min_tokens=3, logit_bias=((4, 1.5),)
    )
    assert (drawing.seed, drawing.prompt_length) == (11, 5)
    assert drawing.end_ids == {0, 9}
    assert parameters.sequence_id_of(found) == sequence.id
    parameters.strip(found)
    assert parameters.drawing_of(found) is None
    assert parameters.sequence_id_of(found) is None


def test_lossy_acceptance_is_refused(engine: VllmEngine) -> None:
    lossy = messages.SpeculationOptions(acceptance=messages.Acceptance.TYPICAL)
    with pytest.raises(OutriderError) as refused:
        submitted(engine, speculation=lossy)
    assert refused.value.reason is Reason.UNSUPPORTED_PARAMETER


def test_vllm_gets_the_grammar_as_our_compiler_has_translated_it(engine: VllmEngine) -> None:
    translated: Any = SimpleNamespace(lark='start: "a"+')
    sampling = messages.SamplingParams(temperature=0.0)
    grammar = Grammar(GrammarKind.REGEX, "a+")
    request = TokenRequest(list(PROMPT), 9, sampling, grammar=grammar)
    engine.submit(request, lambda _: None, matcher=translated)
    llm: Any = engine._llm
    [found] = llm.asked.values()
    assert vars(found.structured_outputs) == {"grammar": 'start: "a"+'}
