"""Fixtures: an authority for each test. Other tests' rigs are imported from their folders."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
sys.path.insert(0, str(Path(__file__).parents[1] / "verifier"))

from certificates import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)
