"""Fixtures: an authority for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificates import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)
