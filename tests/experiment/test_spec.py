"""Experiment files load as their schema says; errors name the wrong field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.errors import OutriderError
from outrider_bench.experiment.launches import (
    Endpoint,
    drafter_count,
    process_names,
    verifier_launch,
)
from outrider_bench.experiment.records import ways_of
from outrider_bench.experiment.run import groups
from outrider_bench.experiment.spec import Experiment, Target, load
from outrider_bench.experiment.stack import check, in_process_drafters

FILES = sorted((Path(__file__).parents[2] / "bench/experiments").glob("*.yaml"))

INSIDE = {"family": "head", "transport": "in-process"}


def _experiment(**more: Any) -> dict[str, Any]:
    drafters = {"near": {}, "far": {"link": "wire"}}
    return {"name": "test", "drafters": drafters, "links": {"wire": {}}, "use": ["far"], **more}


def _written(directory: Path, data: dict[str, Any]) -> Path:
    path = directory / "file.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def test_there_are_experiments_to_check() -> None:
    names = {"small", "round-trip", "placement", "places"}
    assert {path.stem for path in FILES} >= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_ready_experiment_loads_and_is_named_after_its_file(path: Path) -> None:
    experiment = load(path)
    assert experiment.name == path.stem
    assert experiment.question.endswith("?")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"colour": 1}, "colour: there is no such field"),
        ({"links": {"wire": {"mbits": 1}}}, "links.wire.mbits: there is no such field"),
        ({"links": {"wire": {"loss": 1.0}}}, "links.wire.loss: Input should be less than 1"),
        ({"links": {}}, "drafters.far.link: must be one of"),
        ({"use": ["middle"]}, "use: must be one of near, far, not 'middle'"),
        (
            {"drafters": {"load": {}}, "use": ["load"]},
            "drafters.load: another process has this name",
        ),
        (
            {"drafters": {"near": {"transport": "unix", "link": "wire"}}, "use": ["near"]},
            "transport unix takes no link",
        ),
        (
            {"drafters": {"near": {**INSIDE, "threads": 1}}, "use": ["near"]},
            "transport in-process takes no link, host, cores or threads",
        ),
        (
            {"drafters": {"near": {**INSIDE, "count": 2}}, "use": ["near"]},
            "transport in-process is one drafter",
        ),
        (
            {"workload": {"kinds": ["poems"]}},
            "kinds must be of code, rewriting, json, chat, schema, tools, not 'poems'",
        ),
        ({"sweep": {"links.fog.loss": [0]}}, "sweep.links.fog.loss: there is no such place"),
        (
            {"sweep": {"links.wire.loss": [0, 2]}},
            "sweep, at links.wire.loss = 2: links.wire.loss: Input should be less",
        ),
        ({"sweep": {"links.wire.los": [0]}}, "links.wire.los: there is no such field"),
        ({"sweep": {"use": [["middle"]]}}, "use: must be one of near, far, not 'middle'"),
        (
            {"sweep": {"question": ["a?", "a!"]}},
            "sweep: two cells would have the name 'question=a-'",
        ),
        ({"sweep": {"costs": ["a", "b"]}}, "sweep: one run has one cost table"),
        ({"skip": [{"use": ["near"]}]}, "skip: must be one of"),
    ],
)
def test_a_wrong_file_is_refused_with_its_field(
    tmp_path: Path, more: dict[str, Any], problem: str
) -> None:
    path = _written(tmp_path, _experiment(**more))
    with pytest.raises(ValueError, match=problem) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"target": {"model": "models/absent"}}, r"target\.model.*models/absent"),
        ({"target": {"settings": {"draft_token": "auto"}}}, r"target\.settings.*draft_token"),
        (
            {"drafters": {"far": {"settings": {"max_draft_len": 0}}}},
            r"drafters\.far.*max-draft-len",
        ),
        ({"drafters": {"far": {"family": "oracle"}}}, r"drafters\.far\.family.*oracle"),
        ({"drafters": {"far": {"host": "there"}}}, r"drafters\.far\.host.*only be predicted"),
        (
            {"drafters": {"far": {"transport": "in-process"}}},
            r"drafters\.far ngram computes nothing on a device",
        ),
        (
            {"drafters": {"far": {"family": "head"}}, "target": {"settings": {"device": "cuda"}}},
            r"drafters\.far reads states that CUDA graphs and vLLM keep only if",
        ),
        (
            {"drafters": {"far": {"family": "head"}}, "target": {"settings": {"engine": "vllm"}}},
            r"drafters\.far reads states that CUDA graphs and vLLM keep only if",
        ),
        (
            {"drafters": {"far": {**INSIDE, "settings": {"page_count": "few"}}}},
            r"drafters\.far.*page-count",
        ),
    ],
)
def test_wrong_settings_are_refused_before_any_process_starts(
    more: dict[str, Any], problem: str
) -> None:
    experiment = Experiment.model_validate(_experiment(**more))
    with pytest.raises(OutriderError, match=problem):
        check(experiment)


@pytest.mark.parametrize(
    ("drafter", "settings"),
    [
        ({"family": "head"}, {"device": "cuda", "feature_states": "1,3,5"}),
        ({"family": "head"}, {"device": "cpu"}),
        (INSIDE, {"device": "cuda"}),
    ],
)
def test_a_head_whose_states_are_kept_is_not_refused(
    drafter: dict[str, Any], settings: dict[str, Any]
) -> None:
    target = {"settings": settings}
    check(Experiment.model_validate(_experiment(drafters={"far": drafter}, target=target)))


def test_cells_that_differ_in_links_and_load_share_one_stack() -> None:
    sweep = {
        "use": [["near"], ["far"]],
        "links.wire.round_trip_ms": [0, 5],
        "workload.batch": [1, 4],
        "target.threads": [1, 2],
    }
    found = groups(Experiment.model_validate(_experiment(sweep=sweep)).cells())
    assert [[len(cells) for cells in stacks] for stacks in found] == [[4, 4], [4, 4]]


def test_a_head_in_the_verifiers_process_needs_a_verifier_of_its_own() -> None:
    drafters = {"near": INSIDE, "far": {"family": "head"}, "words": {}}
    sweep = {"use": [["near"], ["near", "words"], ["far"], ["words"], []]}
    experiment = Experiment.model_validate(_experiment(drafters=drafters, sweep=sweep))
    cells = experiment.cells()
    assert [[len(each) for each in stacks] for stacks in groups(cells)] == [[1, 1], [1, 1, 1]]
    assert [drafter_count(cell.experiment) for cell in cells] == [1, 2, 1, 1, 0]
    assert process_names("near", experiment.drafters["near"]) == []


def test_a_verifier_is_started_with_the_drafters_in_its_process() -> None:
    endpoint = Endpoint("verifier-1", "", 1, 2, "127.0.0.1:3")
    drafters = {
        "inner": {**INSIDE, "model": "models/heads/mtp"},
        "small": {"family": "model", "transport": "in-process", "settings": {"page_count": 9}},
    }
    in_process = in_process_drafters(
        Experiment.model_validate(_experiment(drafters=drafters, use=["inner", "small"])),
        Path("models/target"),
    )
    launches = [
        verifier_launch(Target(), Path("models/target"), endpoint, each)
        for each in ([], in_process)
    ]
    assert [each.module for each in launches] == ["verifier_svc", "outrider_cli.verifier"]
    assert "--in-process" not in launches[0].arguments
    assert launches[1].arguments[-4:] == (
        "--in-process",
        "head=models/heads/mtp,id=inner",
        "--in-process",
        "model=models/draft,page_count=9,id=small",
    )


def test_a_cell_without_drafters_is_measured_plain_alone() -> None:
    plain, drafted = Experiment.model_validate(_experiment(sweep={"use": [[], ["far"]]})).cells()
    assert ways_of(plain) == ["plain"]
    assert ways_of(drafted) == ["plain", "drafted"]
