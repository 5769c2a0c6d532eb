"""Makes the fakes beside the tests importable, and gives each test process one core."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))
# For `head_files`.
sys.path.append(str(Path(__file__).parents[1] / "heads"))


@pytest.fixture(autouse=True, scope="module")
def few_collections() -> Iterator[None]:
    """With the default thresholds, a third of the time goes into looking for cycles."""
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    yield
    gc.set_threshold(*thresholds)
