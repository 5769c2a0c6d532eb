"""With our noise, vLLM's samplers draw what our engine commits; tested without vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.lm.pages import KVSequence
from outrider.protocol.messages import SamplingParams, SpeculationStats, TokenRequest
from outrider.sampling.context import Context
from tests.accepting import accept
from tests.verifier.fake_vllm import SamplingParams as VllmParameters
from tests.verifier.fake_vllm import installed
from verifier_svc.state.sequence import Sequence as SequenceState
from verifier_svc.verification.draft import Draft
from verifier_svc.vllm.parameters import drawing_of, vllm_parameters

VOCAB = 50
SAMPLINGS = {
    "seeded": SamplingParams(0.8, top_p=0.9),
    "greedy": SamplingParams(0.0),
    "penalised": SamplingParams(0.8, repetition_penalty=1.4, frequency_penalty=0.5),
    "late end": SamplingParams(0.8, min_tokens=8),
    "greedy, penalised": SamplingParams(0.0, presence_penalty=0.5),
}
PROMPT = [3, 1, 4]


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    with installed():
        yield


class Row:
    """A request in the middle of its text, with a draft."""

    def __init__(self, name: str, sampling: SamplingParams, seed: int, drafted: list[int]) -> None:
        self.name, self.drafted, self.seed = name, drafted, seed
        rng = np.random.default_rng(seed)
        self.text = [*PROMPT, *rng.integers(0, 20, 2 + seed % 4).tolist()]
        request = TokenRequest(
            PROMPT, 40, sampling, frozenset({7}), True, committed=self.text[3 : 3 + seed % 2]
        )
        sequence = SequenceState(
            id=1 + seed,
            arrival=seed,
            request=request,
            seed=seed,
            max_draft_tokens=4,
            end_ids=frozenset({7}),
            kv=KVSequence(),
            sink=lambda _: None,
            tokens=[*request.prompt, *request.committed],
            stats=SpeculationStats(),
        )
        self.parameters: Any = vllm_parameters(sequence)
        # A message to a worker process would change the arguments in the same way.
        self.parameters.extra_args = json.loads(json.dumps(self.parameters.extra_args))
        self.is_drawn = drawing_of(self.parameters) is not None
        drafts = [max(token, 0) for token in drafted]
        self.draft = Draft(Context(sampling, self.text, 3, drafts, frozenset({7})), seed)


def rows_of(step: int) -> list[Row]:
    """Return a request of each kind. One request has no draft, and another has a padded row."""
    drafts: list[list[int]] = [[5, 6], [], [9], [-1, -1], [2, 2, 2]]
    pairs = zip(SAMPLINGS.items(), drafts[step % 5 :] + drafts[: step % 5], strict=True)
    rows = [Row(name, each, 10 * step + i, d) for i, ((name, each), d) in enumerate(pairs)]
    return [*rows, Row("others'", SAMPLINGS["greedy"], 10 * step + 9, [1])]


def committed(row: Row, logits: torch.Tensor) -> list[int]:
    """Return the tokens that our engine would draw in each row of a request."""
    found = []
    for count in range(len(row.drafted) + 1):
        context = Context(
            row.draft.context.sampling,
            [*row.text, *row.draft.context.drafted[:count]],
            3,
            (),
            frozenset({7}),
        )
        [result] = accept(logits[count : count + 1], [Draft(context, row.seed)])
        found.append(result.next_token)
    return found


def logits_for(rows: Sequence[Row], step: int) -> torch.Tensor:
    count = sum(len(row.drafted) + 1 for row in rows)
    return torch.from_numpy(np.random.default_rng(step).normal(0, 2, (count, VOCAB))).float()


def check(rows: Sequence[Row], before: torch.Tensor, after: torch.Tensor) -> None:
    """Check that each drawn row favours its committed token, and other rows are unchanged."""
    first = 0
    for row in rows:
        part = slice(first, first + len(row.drafted) + 1)
        first = part.stop
        if row.is_drawn:
            assert after[part].argmax(-1).tolist() == committed(row, before[part]), row.name
        else:
            assert torch.equal(after[part], before[part]), row.name


class V1Runner:
    """The fields that we use of vLLM's first runner, and its samplers' processing of logits."""

    def __init__(self, rows: Sequence[Row], step: int) -> None:
        def same(logits: torch.Tensor, *rest: object) -> torch.Tensor:
            return logits

        self.sampler = SimpleNamespace(apply_logits_processors=same)
        self.rejection_sampler = SimpleNamespace(apply_logits_processors=same)
        width = max(len(row.text) for row in rows)
        ids = np.zeros((len(rows), width), np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row.text)] = row.text
        self.input_batch = SimpleNamespace(
            req_ids=[str(i) for i in range(len(rows))],
            spec_token_ids=[row.drafted for row in rows],
            num_tokens_no_spec=np.array([len(row.text) for row in rows]),
            token_ids_cpu=ids,
        )
        self.requests = {
            str(i): SimpleNamespace(sampling_params=row.parameters) for i, row in enumerate(rows)
        }
        self.discard_request_mask = SimpleNamespace(np=np.zeros(len(rows), bool))


@pytest.mark.parametrize("step", range(5))
def test_the_first_runners_samplers_get_the_committed_tokens(step: int) -> None:
    from verifier_svc.vllm.noise import V1Noise

    rows = rows_of(step)
    runner: Any = V1Runner(rows, step)
    noise = V1Noise(runner)
    logits = logits_for(rows, step)
    starts = np.cumsum([0] + [len(row.drafted) + 1 for row in rows])
    bonus = torch.from_numpy(starts[1:] - 1)
    target = torch.tensor([i for i in range(starts[-1]) if i not in bonus])
    metadata: Any = SimpleNamespace(bonus_logits_indices=bonus, target_logits_indices=target)
    noise.draw(logits, metadata)
    after = logits.clone()
    after[bonus] = runner.sampler.apply_logits_processors(logits[bonus].clone(), None, False)
    drafted = runner.rejection_sampler.apply_logits_processors
    after[target] = drafted(logits[target].clone(), None, metadata)
    check(rows, logits, after)
    noise.clear()
    kept = logits[bonus].clone()
    assert torch.equal(runner.sampler.apply_logits_processors(kept.clone(), None, False), kept)


def test_without_drafts_each_request_has_one_row_and_parts_of_prompts_are_not_drawn() -> None:
    from verifier_svc.vllm.noise import V1Noise

    rows = [Row(name, each, i, []) for i, (name, each) in enumerate(SAMPLINGS.items())]
    runner: Any = V1Runner(rows, 0)
    runner.discard_request_mask.np[2] = True
    rows[2].is_drawn = False
    noise = V1Noise(runner)
    logits = logits_for(rows, 1)
    noise.draw(logits, None)
    check(rows, logits, runner.sampler.apply_logits_processors(logits.clone(), None, False))


@pytest.mark.parametrize("step", range(5))
def test_the_second_runners_processor_gets_the_committed_tokens(step: int) -> None:
    from verifier_svc.vllm.noise import CoupledNoise

    rows = rows_of(step)
    places = {str(i): 2 * i for i in range(len(rows))}
    ids = torch.zeros(2 * len(rows), 20, dtype=torch.long)
    prefill = np.zeros(2 * len(rows), np.int64)
    for i, row in enumerate(rows):
        ids[2 * i, : len(row.text)] = torch.tensor(row.text)
        prefill[2 * i] = len(PROMPT)
    # One row's prompt is not complete yet.
    prefill[2] = 30
    rows[1].is_drawn = False
    states: Any = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=ids), prefill_len=SimpleNamespace(np=prefill)
    )
    processor: Any = CoupledNoise(None, states)
    for i, row in enumerate(rows):
        assert processor.add_request(2 * i, row.parameters) is (
            drawing_of(row.parameters) is not None
        )
    lengths = [len(row.text) for row in rows]
    output: Any = SimpleNamespace(
        num_scheduled_tokens={str(i): 1 + len(row.drafted) for i, row in enumerate(rows)},
        scheduled_spec_decode_tokens={
            str(i): row.drafted for i, row in enumerate(rows) if row.drafted
        },
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[str(i) for i in range(len(rows) - 1)],
            num_computed_tokens=[length - 1 for length in lengths[:-1]],
        ),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=str(len(rows) - 1), num_computed_tokens=lengths[-1] - 1)
        ],
    )
    processor.begin_step(output, places)
    context: Any = SimpleNamespace(idx_mapping_np=np.array(list(places.values())))
    logits = logits_for(rows, step)
    check(rows, logits, processor.apply(logits.clone(), context))


def test_a_place_that_another_request_takes_over_has_its_own_settings() -> None:
    from verifier_svc.vllm.noise import CoupledNoise

    states: Any = SimpleNamespace()
    processor: Any = CoupledNoise(None, states)
    seeded = Row("seeded", SAMPLINGS["seeded"], 1, [])
    assert processor.add_request(0, seeded.parameters)
    others: Any = VllmParameters(extra_args=None)
    assert not processor.add_request(0, others)
    assert processor._texts == {}
