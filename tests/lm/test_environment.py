"""Environment variables for libraries are set before the libraries are loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("service", ["verifier_svc", "drafter_svc"])
def test_openmps_spin_count_is_set_before_torch_loads(service: str) -> None:
    code = (
        f"import os, sys, {service}.__main__; "
        "print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    )
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }

    def printed_with(**variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=inherited | variables,
        )
        return done.stdout.strip()

    assert printed_with() == "False 20000"
    assert printed_with(GOMP_SPINCOUNT="7") == "False 7"
    assert printed_with(OMP_WAIT_POLICY="passive") == "False None"
