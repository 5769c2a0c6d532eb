"""A head shares two matrices of its target, however the target's files and tensors are named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from outrider.errors import OutriderError, Reason
from outrider.heads.loading import target_weights
from outrider.heads.reading import read_target_config
from outrider_cli.check_head import run

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "models/target"
HEAD = ROOT / "models/heads/eagle3"
INDEX = "model.safetensors.index.json"
COMMIT = "0" * 40
ID = "me/target"


def in_hub_cache(cache: Path) -> Path:
    """Put the bundled target into a cache of the hub; return the folder of its snapshot."""
    repo = cache / f"models--{ID.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    shutil.copytree(TARGET, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(COMMIT)
    return snapshot


def split(folder: Path, without: str) -> None:
    """Divide the folder's weights: one file for the embeddings, one for all else, and an index.

    The file `without` is left out.
    """
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first = {name: tensors.pop(name) for name in ["model.embed_tokens.weight"]}
    places: dict[str, str] = {}
    for i, part in enumerate((first, tensors)):
        save_file(part, folder / f"model-{i}.safetensors")
        places |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / without).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty cache of the hub; no test asks the hub itself."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("is_split", [False, True])
def test_a_target_by_its_hub_id_has_the_weights_of_its_folder(
    is_split: bool, offline: Path
) -> None:
    snapshot = in_hub_cache(offline)
    if is_split:
        # This part is neither needed nor fetched.
        split(snapshot, without="model-1.safetensors")
    expected = target_weights(TARGET)
    found = target_weights(ID)
    assert torch.equal(found.embeddings, expected.embeddings)
    assert torch.equal(found.lm_head, expected.lm_head)


@pytest.mark.slow
def test_check_head_takes_a_target_by_its_hub_id(tmp_path: Path) -> None:
    in_hub_cache(tmp_path / "hub")
    command = [sys.executable, "-m", "outrider_cli.main", "check-head", str(HEAD), ID]
    ended = subprocess.run(
        command,
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "states [1, 3, 5]" in ended.stdout


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_vision_models_have_them_under_a_prefix(prefix: str, tmp_path: Path) -> None:
    embeddings, lm_head = torch.randn(5, 4), torch.randn(5, 4)
    outer = "language_model." if prefix.startswith("language_model.") else ""
    names = {f"{prefix or 'model.'}embed_tokens.weight": embeddings}
    save_file(names | {f"{outer}lm_head.weight": lm_head}, tmp_path / "model.safetensors")
    found = target_weights(tmp_path)
    assert torch.equal(found.embeddings, embeddings)
    assert torch.equal(found.lm_head, lm_head)


# Changes to a target's folder, and words of the error for the changed folder.
BROKEN: dict[str, tuple[Any, str]] = {
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        r"has no weights model\.embed_tokens\.weight in safetensors files, which a head shares",
    ),
    "a pointer of Git LFS": (
        lambda f: (f / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1"
        ),
        r"model\.safetensors cannot be read: it is a pointer of Git LFS; run `git lfs pull`",
    ),
    "a shard that is missing": (
        lambda f: split(f, without="model-0.safetensors"),
        r"lacks model-0\.safetensors, which model\.safetensors\.index\.json names; download",
    ),
    "an index that leads elsewhere": (
        lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "/x"}})),
        r"index\.json names '/x', which is no file beside it",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_target_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    spoil, words = BROKEN[name]
    folder = shutil.copytree(TARGET, tmp_path / "target")
    target_weights(folder)
    spoil(folder)
    with pytest.raises(OutriderError, match=words) as error:
        target_weights(folder)
    assert (error.value.reason, error.value.field) == (Reason.INVALID_VALUE, "target")


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "of-its-own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def with_own_code(folder: Path) -> Path:
    """Copy the bundled target, and give it a model type that only code in the copy defines."""
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config |= {"model_type": "of-its-own", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE)
    return folder


def test_a_targets_own_code_runs_only_where_the_operator_trusts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_own_code(tmp_path / "target")
    with pytest.raises(OutriderError, match=r"brings its own code, .* --trust-remote-code"):
        read_target_config(str(folder))
    config = read_target_config(str(folder), trust_remote_code=True)
    assert config.model_type == "of-its-own"
    assert run(HEAD, str(folder), "auto", "cpu", trust_remote_code=True) == 0
    assert "right guesses after" in capsys.readouterr().out
