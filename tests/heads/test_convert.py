"""`outrider convert-head` makes readable heads from pickled ones, and runs no pickled code."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import OutriderError
from outrider.heads.convert import run
from outrider.heads.reading import read
from outrider.heads.unpickle import convert
from tests.heads import head_files
from tests.heads.head_files import TARGET, write


def pickled(folder: Path, files: head_files.Files, name: str) -> Path:
    """Write a head whose tensors are in one pickled file."""
    write(folder, files)
    (folder / "model.safetensors").unlink()
    torch.save(files[1], folder / name)
    return folder


def test_a_pickled_head_is_the_same_afterwards(tmp_path: Path) -> None:
    files = head_files.medusa_official()
    source = pickled(tmp_path / "in", files, "medusa_lm_head.pt")
    (source / "training_args.bin").write_bytes(b"no tensors")
    with pytest.raises(OutriderError, match=r"is pickled; `outrider convert-head .*in OUT`"):
        read(source, TARGET)
    command = [sys.executable, "-m", "outrider_cli.main", "convert-head", str(source)]
    ended = subprocess.run(
        [*command, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    names = "config.json", "medusa_lm_head.safetensors"
    assert ended.stdout.split() == [str(tmp_path / "out" / name) for name in names]
    found = read(tmp_path / "out", TARGET)
    expected = read(write(tmp_path / "first", files), TARGET)
    assert found.spec == expected.spec
    assert all(torch.equal(found.tensors[key], value) for key, value in expected.tensors.items())


def test_mimos_mask_becomes_an_embedding(tmp_path: Path) -> None:
    source = write(tmp_path / "in", head_files.dflash_zlab())
    row = torch.randn(1, 16)
    torch.save({"mask_token_id": 7, "embedding": row}, source / "mask_embedding.pt")
    convert(source / "mask_embedding.pt", source / "mask_embedding.safetensors")
    (source / "mask_embedding.pt").unlink()
    head = read(source, TARGET)
    assert head.spec.mask_token_id is None
    assert torch.equal(head.tensors["mask_embedding"], row[0])


class Code:
    """An object whose pickle calls a function as soon as it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_code_in_a_file_is_refused_and_does_not_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "head.pt", tmp_path / "trace"
    path.write_bytes(pickle.dumps({"a": Code(trace)}, protocol=2))
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        convert(path, tmp_path / "head.safetensors")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "words"),
    [({"a": 3}, "'a' is a int, not a tensor"), ([torch.ones(2)], "a list, not tensors by name")],
)
def test_anything_but_tensors_by_name_is_refused(content: Any, words: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "head.pt")
    with pytest.raises(ValueError, match=words):
        convert(tmp_path / "head.pt", tmp_path / "head.safetensors")


def test_a_file_that_takes_too_long_is_refused(tmp_path: Path) -> None:
    source = pickled(tmp_path / "in", head_files.medusa_official(), "medusa_lm_head.pt")
    with pytest.raises(OutriderError, match=r"reading it took more than 0\.01 s"):
        run(source, tmp_path / "out", seconds=0.01)


def test_a_folder_with_safetensors_needs_no_conversion(tmp_path: Path) -> None:
    source = write(tmp_path / "in", head_files.medusa_official())
    for name in ("pytorch_model.bin", "optimizer.pt"):
        (source / name).write_bytes(b"no tensors")
    with pytest.raises(OutriderError, match="in safetensors files already; use it as it is"):
        run(source, tmp_path / "out")


def test_beside_safetensors_only_mimos_mask_is_converted(tmp_path: Path) -> None:
    source = write(tmp_path / "in", head_files.dflash_zlab())
    (source / "pytorch_model.bin").write_bytes(b"no tensors")
    torch.save({"mask_token_id": 7, "embedding": torch.randn(1, 16)}, source / "mask_embedding.pt")
    with pytest.raises(OutriderError, match=r"mask_embedding\.pt is pickled"):
        read(source, TARGET)
    run(source, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "mask_embedding.safetensors", "model.safetensors"]
    assert read(tmp_path / "out", TARGET).spec.mask_token_id is None


def test_folders_without_a_pickled_head_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in", head_files.medusa_official())
    (source / "model.safetensors").unlink()
    (source / "training_args.bin").write_bytes(b"no tensors")
    with pytest.raises(OutriderError, match="has none of the files"):
        run(source, tmp_path / "out")
    with pytest.raises(OutriderError, match="exists already"):
        run(source, source)
    with pytest.raises(OutriderError, match=r"has no config\.json"):
        run(tmp_path / "none", tmp_path / "out")
