"""A workload has the requests that its file describes."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from gateway.tools.formats import FORMATS
from outrider_bench.experiment.spec import Workload
from outrider_bench.experiment.traffic import Encoder, requests_of, warm_up_of
from outrider_bench.prompts import GRAMMARS


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(Path("models/target"))


def _workload(**settings: object) -> Workload:
    return Workload.model_validate(settings)


def test_a_load_has_its_waves_and_lengths_around_the_mean(encoder: Encoder) -> None:
    requests = requests_of(_workload(batch=4, waves=8, output_tokens=64), encoder)
    assert len(requests) == 32
    lengths = [request.output_tokens for request in requests]
    assert min(lengths) >= 32
    assert max(lengths) <= 96
    assert abs(mean(lengths) - 64) < 2
    assert [request.kind for request in requests[:5]] == [
        "code",
        "rewriting",
        "json",
        "chat",
        "code",
    ]


def test_prompts_for_warming_up_are_never_measured(encoder: Encoder) -> None:
    workload = _workload(batch=16, waves=8)
    measured = {tuple(request.prompt) for request in requests_of(workload, encoder)}
    assert not measured & {tuple(r.prompt) for r in warm_up_of(workload, encoder)}


def test_the_grammar_of_tools_is_that_of_qwen_3() -> None:
    own = GRAMMARS["tools"]["structural_tag"]["format"]
    form = FORMATS["qwen_3"]
    [marks] = form.calls
    assert [form.trigger.startswith(trigger) for trigger in own["triggers"]] == [True]
    for tag in own["tags"]:
        name = tag["begin"].split('"')[3]
        assert (tag["begin"], tag["end"]) == (marks.begin.replace("{name}", name), marks.end)
