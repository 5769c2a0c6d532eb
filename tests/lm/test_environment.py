"""What is said to libraries by environment variables is said before they are loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("service", ["verifier_svc", "drafter_svc"])
def test_openmp_is_told_how_long_to_spin_before_torch_is_loaded(service: str) -> None:
    code = f"import os, sys, {service}.__main__; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"

    def said(**more: str) -> str:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
        }
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment | more
        ).stdout.strip()

    assert said() == "False 20000"
    assert said(GOMP_SPINCOUNT="7") == "False 7"
    assert said(OMP_WAIT_POLICY="passive") == "False None"
