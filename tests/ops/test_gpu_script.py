"""The parts of bench/gpu.sh that can be tested without a GPU and without a network."""

import json
import re
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.launch.grow import Shape, grown_config

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "bench" / "gpu.sh").read_text()
THERE = set("".join(re.findall(r'^there="([^"]+)"', SCRIPT, re.MULTILINE)).split())


def test_the_script_is_valid_bash_and_prints_its_usage() -> None:
    subprocess.run(["bash", "-n", ROOT / "bench" / "gpu.sh"], check=True)
    usage = subprocess.run([ROOT / "bench" / "gpu.sh"], capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    commands = set(re.findall(r"bench/gpu\.sh \w+", usage.stdout))
    assert {"bench/gpu.sh wheels", "bench/gpu.sh run"} <= commands


@pytest.mark.parametrize("package", ["torch", "transformers", "tokenizers", "matplotlib"])
def test_dependencies_of_torch_and_its_kind_are_not_downloaded(package: str) -> None:
    needs = map(Requirement, requires(package) or [])
    here = {
        canonicalize_name(need.name)
        for need in needs
        if need.marker is None or need.marker.evaluate({"extra": ""})
    }
    # Only torch needs CUDA's packages, and the machine has those. typing-extensions is downloaded,
    # since pydantic needs a new version and torch takes any newer one.
    missing = {name for name in here - THERE if not name.startswith(("cuda-", "nvidia-"))}
    assert missing <= {"typing-extensions"}


def test_grpcio_and_protobuf_are_downloaded() -> None:
    assert not {"grpcio", "protobuf"} & THERE


def test_the_grown_shape_fits_the_target_and_has_8_b_parameters() -> None:
    [shape] = re.findall(r"--grown-shape '(\[.+?\])'", SCRIPT)
    config = grown_config(
        LlamaConfig.from_pretrained(ROOT / "models" / "target"),
        Shape(*json.loads(shape)),
        torch.bfloat16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert round(model.num_parameters() / 1e9) == 8
