"""Tables for hardware that is not here load, are marked as not measured, and can be made again."""

from pathlib import Path

import pytest

from outrider_bench.experiment import hardware
from outrider_bench.experiment.profile import main
from outrider_bench.simulator.costs import Costs, load


@pytest.mark.parametrize("name", hardware.names())
def test_a_bundled_table_is_equal_to_its_arithmetic(name: str) -> None:
    assert load(name) == hardware.table(name, hardware.TARGET, hardware.DRAFT)


@pytest.mark.parametrize("name", hardware.names())
def test_a_published_table_says_that_it_was_not_measured_and_cites(name: str) -> None:
    costs = load(name)
    assert not costs.measured
    assert costs.source.startswith("not measured")
    assert costs.source.count("https://") >= 4
    assert "Assumed: " in costs.source


def test_the_command_makes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    assert main(["--hardware", "gb200", "--target", "llama-8b", "--out", str(out)]) == 0
    assert "not measured" in capsys.readouterr().out
    costs = Costs.model_validate_json(out.read_text())
    # 16 GB at 0.8 × 8 TB/s, and a step's 0.3 ms.
    assert costs.forward_s(1, 1) == pytest.approx(0.0003 + 16e9 / 6.4e12, rel=0.02)


def test_a_large_batch_is_bound_by_arithmetic_and_a_small_one_by_memory() -> None:
    model, device = hardware.MODELS["llama-8b"], hardware.H100
    small = hardware.forward_s(device, 1, model, 1, 1)
    assert hardware.forward_s(device, 1, model, 1, 9) == small
    assert hardware.forward_s(device, 1, model, 128, 1152) == pytest.approx(
        0.0003 + 1152 * 16e9 / (0.8 * 989.4e12)
    )


def test_unknown_hardware_and_models_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--hardware", "abacus"])
    assert "hardware must be one of edge, gb200" in capsys.readouterr().err
    with pytest.raises(ValueError, match="draft must be one of llama-1b"):
        hardware.table("gb200", "llama-70b", "tiny")
    with pytest.raises(ValueError, match="draft: llama-8b needs more than the 8 GB"):
        hardware.table("edge", "llama-70b", "llama-8b")
