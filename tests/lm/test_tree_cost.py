"""The measurement of trees on a GPU has a figure for every cell that fits the cache."""

from __future__ import annotations

from tiny_models import CONFIGS, build

from outrider.lm.runner import ModelRunner
from outrider_bench.tree_cost import measure


def test_every_cell_that_fits_the_cache_is_measured() -> None:
    runner = ModelRunner(build(CONFIGS["llama"]), page_count=6)
    cells = list(measure(runner, (1, 2), (3,), (20, 60), rounds=2))
    assert [(cell["batch"], cell["text"]) for cell in cells] == [(1, 20), (1, 60), (2, 20)]
    assert all(cell[name] > 0 for cell in cells for name in ("chain_ms", "tree_ms", "moves_ms"))
