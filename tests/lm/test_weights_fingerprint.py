"""A checkpoint's fingerprint depends on its tensors and config, not on files, order or origin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.lm.weights_fingerprint import weights_fingerprint

ROOT = Path(__file__).parents[2]
DRAFT = ROOT / "models/draft"
FILE = "model.safetensors"


def copy(tmp_path: Path, name: str = "copy") -> Path:
    return Path(shutil.copytree(DRAFT, tmp_path / name))


def test_the_same_tensors_in_several_files_have_the_same_fingerprint(tmp_path: Path) -> None:
    expected = weights_fingerprint(str(DRAFT))
    folder = copy(tmp_path)
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    names = sorted(tensors, reverse=True)
    parts = {"b.safetensors": names[::2], "a.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, held in parts.items() for name in held}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{FILE}.index.json").write_text(json.dumps(index))
    assert weights_fingerprint(str(folder)) == expected


def changed_values(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.01


def changed_type(tensors: dict[str, torch.Tensor]) -> None:
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name] = tensors[name].double()


def changed_shape(tensors: dict[str, torch.Tensor]) -> None:
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name] = tensors[name].flatten().clone()


def changed_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors["other.norm.weight"] = tensors.pop("model.norm.weight")


@pytest.mark.parametrize("change", [changed_values, changed_type, changed_shape, changed_name])
def test_other_tensors_have_another_fingerprint(tmp_path: Path, change: object) -> None:
    folder = copy(tmp_path)
    tensors = load_file(folder / FILE)
    assert callable(change)
    change(tensors)
    save_file(tensors, folder / FILE, {"format": "pt"})
    assert weights_fingerprint(str(folder)) != weights_fingerprint(str(DRAFT))


@pytest.mark.parametrize(
    ("key", "value", "is_same"),
    [("transformers_version", "9.9", True), ("rms_norm_eps", 0.5, False)],
)
def test_the_config_counts_but_for_its_origin(
    tmp_path: Path, key: str, value: object, is_same: bool
) -> None:
    folder = copy(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    same = weights_fingerprint(str(folder)) == weights_fingerprint(str(DRAFT))
    assert same is is_same


def test_a_model_whose_tensors_are_elsewhere_equals_no_other(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    (folder / FILE).unlink()
    assert weights_fingerprint(str(folder)) != weights_fingerprint(str(folder))


def test_of_a_large_tensor_a_few_kilobytes_are_read(tmp_path: Path) -> None:
    """The fingerprint of a sparse file of 1 TiB is made from its header and 16 samples."""
    size = 2**40
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / FILE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert len(weights_fingerprint(str(tmp_path))) == 64


@pytest.mark.parametrize(
    ("first", "count"), [(0, 1), (0, 500), (900, 500), (1800, 500), (2700, 500), (4095, 1)]
)
def test_a_change_in_any_part_of_a_large_tensor_gives_another_fingerprint(
    tmp_path: Path, first: int, count: int
) -> None:
    """The change is in the first row, in the last row, or in 500 rows, as after more training."""
    rows = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for change in (0.0, 0.01):
        rows[first : first + count] += change
        save_file({"w": rows}, tmp_path / FILE)
        found.append(weights_fingerprint(str(tmp_path)))
    assert found[0] != found[1]
