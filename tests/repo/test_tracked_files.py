"""The repository has no large files but the bundled models."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_BYTES = 2**20
# The bundled pair of models, which everything needs, and other drafters for the bundled target and
# for SmolLM2.
LARGE = {
    "models/target/model.safetensors",
    "models/draft/model.safetensors",
    "models/draft-2048/model.safetensors",
    "models/heads/eagle3/model.safetensors",
    "models/heads/mtp/model.safetensors",
    "models/smollm2/draft/model.safetensors",
    "models/smollm2/draft/tokenizer.json",
    "models/smollm2/eagle3/model.safetensors",
    "models/smollm2/mtp/model.safetensors",
}


def test_only_the_bundled_models_are_large() -> None:
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = [path for path in listed.split("\0") if path and (ROOT / path).is_file()]
    assert {path for path in paths if (ROOT / path).stat().st_size > MOST_BYTES} == LARGE
