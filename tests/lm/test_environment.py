"""What is said to libraries by environment variables is said before they are loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("service", ["verifier_svc", "drafter_svc"])
def test_openmp_is_told_how_long_to_spin_before_torch_is_loaded(service: str) -> None:
    code = f"import sys, {service}.__main__, torch; n = list(sys.modules); print(n.index('outrider') < n.index('torch'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"
