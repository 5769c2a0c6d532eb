"""Environment variables for libraries are set before the libraries are loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("service", "variables", "spins"),
    [
        ("verifier_svc", {}, "20000"),
        ("verifier_svc", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("drafter_svc", {"OMP_WAIT_POLICY": "passive"}, "None"),
    ],
)
def test_openmps_spin_count_is_set_before_torch_loads(
    service: str, variables: dict[str, str], spins: str
) -> None:
    code = (
        f"import os, sys, {service}.__main__; "
        "print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    )
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=inherited | variables,
    )
    assert done.stdout.strip() == f"False {spins}"
