"""Heads that speculators builds and saves give the same scores here as in speculators."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.heads.loading import load
from outrider.heads.model import TargetWeights
from outrider.heads.reading import read
from tests.heads.head_files import Target
from tests.heads.head_scores import scores_of
from tests.heads.speculators_cases import CASES, HIDDEN, LAYERS, LENGTHS, VOCAB

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/speculators/bin/python"
MAKE = "tests.heads.by_speculators.make_heads"
TARGET = Target(
    hidden_size=HIDDEN, num_hidden_layers=LAYERS, vocab_size=VOCAB, max_position_embeddings=512
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PYTHON.parents[1] / "installed").exists(), reason="`make speculators` installs it"
    ),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return all cases, which speculators makes in a separate environment."""
    folder = tmp_path_factory.mktemp("by_speculators")
    command = [PYTHON, "-m", MAKE, folder]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_scores_are_those_of_the_code_that_wrote_the_head(name: str, made: Path) -> None:
    head = read(made / name / "head", TARGET)
    reference = load_file(made / name / "reference.safetensors")
    nothing = torch.zeros(VOCAB, HIDDEN)
    weights = TargetWeights(reference["embeddings"], reference.get("lm_head", nothing))
    model = load(head, weights, page_count=64, page_size=4)
    wanted, steps = reference["scores"], reference["scores"].shape[1]
    text = reference["tokens"].tolist()
    found, proposal = scores_of(model, text, reference["features"], LENGTHS, steps, piece=7)
    if model.target_ids is not None:
        found = found[..., model.target_ids]
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=0)
    # If all scores of a head were equal, the comparison would show nothing.
    assert wanted.std() > 0.3
    if "confidences" in reference:
        torch.testing.assert_close(
            proposal.confidences, reference["confidences"], atol=5e-5, rtol=0
        )
