"""Which states of which rows become features in our hub and vLLM's runner, tested without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import OutriderError
from outrider.protocol.draft_messages import FINAL_STATE, FeatureDtype, FeatureRequest, StepBatch
from tests.verifier.fake_vllm import installed
from tests.verifier.test_vllm_hub import NOBODY, TestHub, opened
from verifier_svc.config import VerifierSettings
from verifier_svc.vllm import features
from verifier_svc.vllm.features import VllmStates
from verifier_svc.vllm.outcome import Outcome
from verifier_svc.vllm.runner import SCHEDULER, _with_offer, _with_states

LAYERS = 4
REQUEST = FeatureRequest((3, 1), final_state=True, dtype=FeatureDtype.FLOAT32)


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    with installed():
        yield


class Model(torch.nn.Module):
    """A model whose state k of a token is `100 * k` plus the token's row."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_eagle3 = True
        self.layers: tuple[int, ...] = ()
        self.lacks = -1
        """A layer whose state the model does not return."""

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.layers = layers

    def forward(self, count: int) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        rows = torch.arange(float(count)).unsqueeze(1)
        returned = [100 * layer + rows for layer in self.layers if layer != self.lacks]
        return (rows - 100, returned) if returned else rows - 100


class Runner:
    """A runner of vLLM that sorts the requests of a step by their names."""

    device = torch.device("cpu")

    def __init__(self, *, executor: str = "uni", fast_prefill: bool = False) -> None:
        self.model = Model()
        model = SimpleNamespace(
            get_total_num_hidden_layers=lambda: LAYERS, get_hidden_size=lambda: 1
        )
        self.vllm_config: Any = SimpleNamespace(
            model_config=model,
            scheduler_config=SimpleNamespace(scheduler_cls=SCHEDULER),
            cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast_prefill),
            parallel_config=SimpleNamespace(distributed_executor_backend=executor),
            additional_config={},
            instance_id=f"{id(self)}",
        )
        self.use_aux_hidden_state_outputs = False
        self.outrider_states: VllmStates | None = None
        self.execute_model_state: Any = None
        self.input_batch: Any = None

    def get_model(self) -> Model:
        return self.model

    def execute(self, states: VllmStates, counts: dict[str, int]) -> None:
        """Run a forward as our wrapper of `execute_model` does."""
        watched = states.begin()
        hidden, returned = self.model(sum(counts.values())), None
        if self.use_aux_hidden_state_outputs:
            hidden, returned = hidden
        self.execute_model_state = SimpleNamespace(hidden_states=hidden, aux_hidden_states=returned)
        self.input_batch = SimpleNamespace(req_ids=sorted(counts))
        states.end(watched, counts)


def made(runner: Runner, *named: int) -> VllmStates:
    return VllmStates(runner, VerifierSettings(target="t", feature_states=[*named]))


def rows_of(hub: TestHub, number: int) -> dict[int, list[float]]:
    """Return the features of a sequence, keyed by position; each may come only once."""
    found: dict[int, list[float]] = {}
    for message in hub.told:
        assert isinstance(message, StepBatch)
        for entry in message.features:
            if entry.sequence_id == number:
                assert isinstance(entry.rows, bytes)
                rows = np.frombuffer(entry.rows, np.float32).reshape(-1, 3).tolist()
                for at, row in enumerate(rows, entry.first_position):
                    assert at not in found
                    found[at] = row
    return found


class Steps:
    """Runs the steps of a hub whose drafter reads features of a runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.states = made(runner, *REQUEST.aux_layers)
        self.hub = TestHub(states=self.states)
        self.hub.add_drafter(feature_request=REQUEST)

    def run(
        self,
        computed: dict[str, int],
        counts: dict[str, int],
        committed: dict[str, list[int]],
        drafts: dict[str, list[int]] | None = None,
    ) -> None:
        """Run a step that computes `counts` tokens of requests after their `computed` tokens."""
        drafts = drafts or {}
        self.hub.plan_step([])
        self.hub.begin(counts, drafts, computed)
        self.runner.execute(self.states, counts)
        self.hub.computed()
        outcomes = [Outcome(name, drafts.get(name, []), committed.get(name, [])) for name in counts]
        self.hub.commit(outcomes, NOBODY)


def state(row: int) -> list[float]:
    return [300.0 + row, 100.0 + row, row - 100.0]


def test_rows_are_those_of_each_request_in_the_runners_order() -> None:
    steps = Steps(Runner())
    opened(steps.hub, "b")
    opened(steps.hub, "a")
    steps.run({"b": 0, "a": 0}, {"b": 5, "a": 5}, {"b": [10], "a": [10]})
    first, second = steps.hub.sequences
    assert rows_of(steps.hub, first) == {at: state(5 + at) for at in range(5)}
    assert rows_of(steps.hub, second) == {at: state(at) for at in range(5)}
    assert not steps.states.kept


def test_a_prompt_in_chunks_behind_cached_tokens_has_the_features_of_what_was_computed() -> None:
    steps = Steps(Runner())
    opened(steps.hub, "a", prompt_length=9)
    steps.run({"a": 4}, {"a": 3}, {})
    steps.run({"a": 7}, {"a": 2}, {"a": [10]})
    [number] = steps.hub.sequences
    assert rows_of(steps.hub, number) == {
        **{4 + row: state(row) for row in range(3)},
        **{7 + row: state(row) for row in range(2)},
    }


def test_rejected_drafts_and_padded_rows_have_no_features() -> None:
    steps = Steps(Runner())
    opened(steps.hub, "a")
    steps.run({"a": 0}, {"a": 9}, {"a": [10]}, {"a": [-1] * 4})
    steps.run({"a": 5}, {"a": 5}, {"a": [11, 12, 50]}, {"a": [11, 12, 13, 14]})
    [number] = steps.hub.sequences
    found = rows_of(steps.hub, number)
    assert [*found] == [*range(8)]
    assert [found[at] for at in (5, 6, 7)] == [state(row) for row in range(3)]


def test_tokens_that_are_computed_again_have_their_features_once() -> None:
    steps = Steps(Runner())
    opened(steps.hub, "a")
    steps.run({"a": 0}, {"a": 5}, {"a": [10]})
    steps.hub.preempted("a")
    steps.run({"a": 0}, {"a": 6}, {"a": [11]})
    [number] = steps.hub.sequences
    assert rows_of(steps.hub, number) == {at: state(at) for at in range(6)}


def test_a_drafter_that_joins_during_a_forward_gets_features_from_the_next_one_on() -> None:
    steps = Steps(Runner())
    hub, runner = steps.hub, steps.runner
    assert hub.drafter is not None
    hub.drafting.leave(hub.drafter)
    opened(hub, "a")
    hub.plan_step([])
    hub.begin({"a": 5}, {}, {"a": 0})
    runner.execute(steps.states, {"a": 5})
    hub.add_drafter(feature_request=REQUEST)
    hub.commit([Outcome("a", [], [10])], NOBODY)
    steps.run({"a": 5}, {"a": 1}, {"a": [11]})
    steps.run({"a": 6}, {"a": 1}, {"a": [12]})
    [number] = hub.sequences
    assert rows_of(hub, number) == {5: state(0), 6: state(0)}


def test_states_are_kept_only_while_a_drafter_reads_them_and_the_model_stays_as_it_is() -> None:
    steps = Steps(Runner())
    assert steps.hub.drafter is not None
    steps.runner.execute(steps.states, {"a": 1})
    assert {*steps.states.kept} == {1, 3, FINAL_STATE}
    steps.hub.drafting.leave(steps.hub.drafter)
    steps.runner.execute(steps.states, {"a": 1})
    assert not steps.states.kept
    assert steps.runner.model.layers == (1, 3)
    assert steps.runner.use_aux_hidden_state_outputs


def test_the_model_keeps_the_states_that_the_settings_name_and_no_others() -> None:
    runner = Runner()
    states = made(runner, 2, FINAL_STATE)
    assert runner.model.layers == (2,)
    assert states.can_watch([FINAL_STATE, 2])
    assert not states.can_watch([3])
    assert made(Runner()).can_watch([FINAL_STATE])


def test_each_config_that_a_part_of_the_model_is_compiled_with_names_the_states() -> None:
    runner = Runner()
    decoder = torch.nn.Identity()
    decoder.vllm_config = SimpleNamespace(additional_config={})  # type: ignore[assignment]
    runner.model.decoder = decoder
    made(runner, 3, 2)
    for config in (runner.vllm_config, decoder.vllm_config):
        assert config.additional_config == {"outrider_feature_states": (2, 3)}


def test_a_step_without_memory_for_features_has_none_and_drafting_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(Runner())
    opened(steps.hub, "a")

    def fail(*_: object) -> bytes:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(steps.states, "copy_states", fail)
        steps.run({"a": 0}, {"a": 5}, {"a": [10]})
        steps.run({"a": 5}, {"a": 1}, {"a": [11]})
    steps.run({"a": 6}, {"a": 1}, {"a": [12]})
    steps.run({"a": 7}, {"a": 1}, {"a": [13]})
    [number] = steps.hub.sequences
    assert rows_of(steps.hub, number) == {6: state(0), 7: state(0)}
    assert caplog.text.count("a step's features are dropped") == 1


def test_a_fault_at_a_forwards_states_costs_its_features_and_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = Runner()
    states = made(runner, 1)
    states.watch([1])
    runner.execute(states, {"a": 1})
    assert states.kept
    for _ in range(2):
        states.end([1], {})
        assert not states.kept
    assert caplog.text.count("no drafter gets features") == 1


def test_a_long_prompts_states_are_the_same_when_they_are_copied_in_pieces() -> None:
    runner = Runner()
    states = made(runner, 1)
    states.watch([1, FINAL_STATE])
    runner.execute(states, {"a": 3000})
    rows = range(100, 2900)
    wanted = states.pick_states([1, FINAL_STATE], rows, "float32").numpy().tobytes()
    assert states.copy_states([1, FINAL_STATE], rows, "float32") == wanted


@pytest.mark.parametrize("dummy", [False, True])
def test_dummy_forwards_keep_no_states(dummy: bool) -> None:
    runner = Runner()
    runner.outrider_states = states = made(runner, 1)
    states.watch([1])
    runner.execute(states, {"a": 2})
    states.clear()
    execute = _with_states(lambda *_, **__: None)
    execute(runner, SimpleNamespace(num_scheduled_tokens={"a": 2}), dummy_run=dummy)
    assert bool(states.kept) != dummy


def test_a_model_that_returns_no_layers_has_only_its_final_state() -> None:
    runner = Runner()
    runner.model.supports_eagle3 = False
    states = made(runner)
    assert states.can_watch([FINAL_STATE])
    assert not states.can_watch([1])
    with pytest.raises(OutriderError, match="feature_states must be -1: vLLM's Model keeps no"):
        made(runner, 1)


def test_a_state_that_the_models_layers_lack_is_refused() -> None:
    assert made(Runner(), LAYERS)
    for state in (0, 5):
        with pytest.raises(OutriderError, match=rf"must be -1 or in \[1, 4\], not \[{state}\]"):
            made(Runner(), state)


@pytest.mark.parametrize("layers", [(1, LAYERS), (LAYERS,)])
def test_a_drafter_that_asks_for_what_the_model_lacks_gets_nothing_and_harms_nobody(
    layers: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner()
    runner.model.lacks = LAYERS
    states = made(runner, *layers)
    states.watch(layers)
    for _ in range(2):
        runner.execute(states, {"a": 5})
        assert not states.kept
    assert caplog.text.count("no drafter gets features") == 1


@pytest.mark.parametrize("unfit", [{"executor": "mp"}, {"fast_prefill": True}])
def test_a_runner_elsewhere_or_with_a_fast_prefill_reads_no_settings_and_offers_no_states(
    unfit: dict[str, Any],
) -> None:
    from verifier_svc.vllm import plugin

    settings = VerifierSettings(target="t")
    inside, other = Runner(), Runner(**unfit)
    load = _with_offer(lambda runner: None)
    load(other)  # without settings: this fails if the settings are read
    with plugin.own_hub(settings, lambda _: TestHub()):
        load(inside)
    assert features.states_for(inside.vllm_config, settings) is not None
    assert features.states_for(other.vllm_config, settings) is None
    named = VerifierSettings(target="t", feature_states=[1])
    with pytest.raises(OutriderError, match="feature_states needs vLLM's runner in the sched"):
        features.states_for(other.vllm_config, named)
