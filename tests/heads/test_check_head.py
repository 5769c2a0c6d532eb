"""`outrider check-head` tells a head of the target from a head of another target."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import OutriderError, Reason
from outrider_cli.check_head import run

ROOT = Path(__file__).parents[2]
TARGET = str(ROOT / "models/target")


@pytest.mark.parametrize(
    ("name", "read"), [("eagle3", "states [1, 3, 5]"), ("mtp", "the final state")]
)
def test_the_bundled_heads_fit_on_the_layers_of_their_files(
    name: str, read: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(ROOT / "models/heads" / name, TARGET, "auto", "cpu") == 0
    printed = capsys.readouterr().out
    shares = {
        what: int(share)
        for what, share in re.findall(r"^  \d\. (.*): \d+ \((\d+)%\)", printed, re.M)
    }
    assert max(shares, key=lambda what: shares[what]) == read
    assert shares[read] > 50
    assert "--head-reading" not in printed


def test_a_head_of_another_target_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "models/heads/mtp", tmp_path / "head")
    path = tmp_path / "head/model.safetensors"
    torch.manual_seed(1)
    noise = {name: torch.randn_like(tensor) / 20 for name, tensor in load_file(path).items()}
    save_file(noise, path)
    assert run(tmp_path / "head", TARGET, "auto", "cpu") == 1
    assert "made for another" in capsys.readouterr().out


def test_a_target_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    for target in (tmp_path, tmp_path / "none"):
        with pytest.raises(OutriderError, match=f"target cannot read {target}: ") as caught:
            run(ROOT / "models/heads/eagle3", str(target), "auto", "cpu")
        assert caught.value.reason is Reason.INVALID_VALUE
