"""An experiment identifies its machine and its commit, and refuses hardware that is missing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from outrider.errors import OutriderError
from outrider_bench.experiment import machine
from outrider_bench.experiment.spec import Experiment


def test_two_looks_at_this_machine_have_one_fingerprint() -> None:
    first, second = machine.this_machine(), machine.this_machine()
    assert first.fingerprint == second.fingerprint
    assert first.cores == sorted(os.sched_getaffinity(0))


def _git(directory: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(
        ["git", "-C", str(directory), *identity, *words], check=True, capture_output=True
    )


def test_a_commit_with_changes_has_another_name(tmp_path: Path) -> None:
    assert machine.commit(tmp_path) == "none"
    _git(tmp_path, "init")
    (tmp_path / "file").write_text("a")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "first")
    clean = machine.commit(tmp_path)
    (tmp_path / "file").write_text("b")
    changed = machine.commit(tmp_path)
    (tmp_path / "new").write_text("c")
    added = machine.commit(tmp_path)
    assert len(clean) == 12
    assert {changed[:13], added[:13]} == {f"{clean}+"}
    assert changed != added


@pytest.mark.parametrize(
    ("drafter", "problem"),
    [
        ({"cores": "0-4095"}, r"drafters\.near\.cores"),
        ({"cores": "0", "numa_node": 99}, r"drafters\.near\.numa_node"),
        ({"family": "model", "device": "cuda:77"}, r"drafters\.near\.device"),
    ],
)
def test_missing_hardware_is_refused_by_its_field(drafter: dict[str, object], problem: str) -> None:
    experiment = Experiment.model_validate(
        {"name": "small", "drafters": {"near": drafter}, "use": ["near"]}
    )
    with pytest.raises(OutriderError, match=problem):
        machine.check(experiment)
