"""Gives each test process one core, and collects garbage seldom."""

import gc
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def few_collections() -> Iterator[None]:
    """With the default thresholds, a third of the time goes into looking for cycles."""
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    yield
    gc.set_threshold(*thresholds)
