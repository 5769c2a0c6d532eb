"""The runner keeps the hidden states that `transformers` returns.

tests/lm/test_cpu_decoder.py has the test of the C decoder.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.lm.runner import Bounds, ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import FINAL_STATE
from tests.lm.recorded_graphs import Capture
from tests.lm.tiny_models import CONFIGS, VOCAB_SIZE, build

NAMES = ["llama", "gemma3, alternating windows", "gpt2, learned positions"]


def text(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.inference_mode()
def expected(model: Any, token_ids: list[int], layer_count: int) -> dict[int, torch.Tensor]:
    """Return the states of `transformers`: each layer's input, and the states after the norm."""
    output = model(torch.tensor([token_ids]), output_hidden_states=True)
    states = {k: output.hidden_states[k][0] for k in range(layer_count)}
    states[FINAL_STATE] = output.hidden_states[-1][0]
    return states


def check(runner: ModelRunner, model: Any) -> None:
    """Compare all states of two packed texts, in chunks, with the states of each text by itself."""
    layer_count = runner.layer_count
    first, second = text(0, 30), text(1, 11)
    runner.forward([SequenceSlice(first[:20], 0, [0], 0)])
    runner.forward([SequenceSlice(first[20:], 20, [0], 2), SequenceSlice(second, 0, [1], 1)])
    wanted = [expected(model, ids, layer_count) for ids in (first, second)]
    for state in (*range(layer_count), FINAL_STATE):
        rows = torch.cat([wanted[0][state][20:], wanted[1][state]])
        found = runner.pick_states([state], range(len(rows)), "float32")
        torch.testing.assert_close(found, rows, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_states_of_the_models_own_forward_are_kept(name: str) -> None:
    runner = ModelRunner(build(CONFIGS[name]), page_size=64, page_count=4)
    states = [*range(runner.layer_count + 1), FINAL_STATE]
    assert runner.can_watch(states)
    runner.watch(states)
    check(runner, build(CONFIGS[name]))


@pytest.mark.parametrize("name", NAMES)
def test_graphs_keep_the_states_that_were_watched_at_their_capture(
    name: str, capture: Capture
) -> None:
    runner = ModelRunner(build(CONFIGS[name]), page_size=64, page_count=4)
    states = [*range(runner.layer_count), FINAL_STATE]
    runner.watch(states)
    runner.capture(Bounds(sequences=4, tokens_each=4, tokens=32))
    assert runner.graph_count > 0
    capture.replays = 0
    check(runner, build(CONFIGS[name]))
    assert capture.replays == 2
    assert runner.can_watch(states[:1])
    assert not runner.can_watch([runner.layer_count])


def test_nothing_is_kept_unless_it_is_watched() -> None:
    runner = ModelRunner(build(CONFIGS["llama"]), page_size=64, page_count=4)
    runner.watch([1])
    runner.watch([])
    runner.forward([SequenceSlice(text(0, 5), 0, [0], 1)])
    with pytest.raises(KeyError):
        runner.pick_states([1], [0], "float32")
    assert not runner.can_watch([-2])
