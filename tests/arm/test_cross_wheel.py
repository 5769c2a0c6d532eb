"""The cross-built wheel for 64-bit ARM has kernels and a compiled step that run there."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

from tests.arm import arm

pytestmark = arm.MARKS


def test_the_wheel_is_for_arm_alone(wheel: Path) -> None:
    assert wheel.name.endswith("-linux_aarch64.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        headers = {archive.read(name)[:20] for name in names}
        assert any(name.endswith("uPlot.iife.js") for name in archive.namelist())
    for build in ("_cpu", "_cpu_arm_dot", "_cpu_arm_bf16"):
        assert f"outrider/lm/cpu/{build}.cpython-311-aarch64-linux-gnu.so" in names
    # An ELF file's machine: 183 is AArch64.
    assert {int.from_bytes(header[18:20], "little") for header in headers} == {183}


def test_its_kernels_compute_there_what_torch_does(packages: Path) -> None:
    command = [*arm.python(packages), str(arm.HERE / "compare_kernels.py")]
    done = subprocess.run(command, cwd=packages, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["machine"] == "aarch64"
    assert found["builds"] == ["_cpu_arm_bf16", "_cpu_arm_dot", "_cpu"]
    assert found["step"].endswith(".so")
    for kernels, own in found["errors"].values():
        assert 0 < kernels < 1.2 * own
