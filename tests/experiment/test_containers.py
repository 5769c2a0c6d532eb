"""Each process of an experiment runs as a service of compose/compose.yaml, with its own words."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from outrider.errors import OutriderError
from outrider_bench.experiment.containers import run_words, service_of
from outrider_bench.experiment.hosts import Launch
from outrider_bench.experiment.places import Places

COMPOSE = Path(__file__).parents[2] / "compose/compose.yaml"
LAUNCHES = [
    Launch("verifier-1", "verifier_svc", ("--listen", "0.0.0.0:20000"), shares=(Path("models"),)),
    Launch("gateway-1", "gateway"),
    Launch("link-wire", "outrider_bench.experiment.link_process"),
    Launch("near-1", "drafter_svc", ("--family", "ngram")),
    Launch("far-1", "drafter_svc", ("--family", "model", "--device", "cuda:1")),
]


def test_compose_has_the_service_of_every_process() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    found = [service_of(launch) for launch in LAUNCHES]
    assert found == [
        "verifier",
        "gateway",
        "drafter-ngram",
        "drafter-ngram",
        "drafter-model-gpu",
    ]
    assert set(found) <= set(services)


def test_a_family_that_no_image_has_is_refused() -> None:
    with pytest.raises(OutriderError, match="near-1, which runs drafter_svc suffix"):
        service_of(Launch("near-1", "drafter_svc", ("--family", "suffix")))


def test_a_container_has_the_experiments_words_and_none_of_the_services_settings() -> None:
    words = list(run_words(LAUNCHES[0], ["OUTRIDER_VERIFIER_UDS"]))
    command = words[words.index("--entrypoint") :]
    assert command == [
        *("--entrypoint", "env", "verifier", "-u", "OUTRIDER_VERIFIER_UDS"),
        *("python", "-m", "verifier_svc", "--listen", "0.0.0.0:20000"),
    ]


def test_a_container_finds_a_relative_path_where_the_caller_has_it() -> None:
    words = list(run_words(LAUNCHES[0], []))
    assert words[words.index("--workdir") + 1] == str(Path.cwd())
    assert f"{Path.cwd()}/models:{Path.cwd()}/models" in words


def test_containers_beside_other_machines_are_refused() -> None:
    places = Places(compose=True)
    with pytest.raises(OutriderError, match="--with compose keeps all processes on this one"):
        places.host("near-1", "far")
