"""Selects a build of the C kernels, so that tests can run against each build."""

import ctypes
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

import outrider.lm
from outrider.lm.cpu import attention as cpu_attention
from outrider.lm.cpu import decoder as cpu_decoder
from outrider.lm.cpu import weights
from outrider.lm.cpu.library import load_build, runnable_builds

_NAMES = {
    "x86_64": ["_cpu", "_cpu_avx2", "_cpu_avx512", "_cpu_avx512_bf16", "_cpu_amx"],
    # On other machines test_arm_kernels.py runs these in QEMU.
    "aarch64": ["_cpu", "_cpu_arm_dot", "_cpu_arm_bf16"],
}
# The quick suite runs the build that this machine uses.
BUILDS = [
    pytest.param(name, marks=[] if name == runnable_builds()[0] else pytest.mark.slow)
    for name in _NAMES.get(platform.machine(), ["_cpu"])
]
_FLAGS = [
    "-O2",
    "-fopenmp",
    "-fno-math-errno",
    "-Wno-psabi",
    "-march=x86-64-v4",
    "-mavx512bf16",
    "-mavx512vnni",
    "-D__AMX_BF16__",
    "-D__AMX_INT8__",
    "-fPIC",
    "-shared",
]
_SOURCES = [
    "paged_attention.c",
    "decoder.c",
    "decoder_float32.c",
    "decoder_int8.c",
    "amx_attention.c",
]


def use_build(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the named build instead of the best one, for objects created from now on."""
    found = _load(name)
    for module in (cpu_attention, cpu_decoder, weights):
        monkeypatch.setattr(module, "library", lambda: found)


def _load(name: str) -> ctypes.CDLL:
    if name in runnable_builds():
        found = load_build(name)
        assert found is not None, "tests need a C compiler when the package is installed"
        return found
    if name == "_cpu_amx" and "_cpu_avx512_bf16" in runnable_builds():
        return _emulated_amx()
    pytest.skip("this processor cannot run that build")


@cache
def _emulated_amx() -> ctypes.CDLL:
    """Compile the AMX build with tile registers in software."""
    source = Path(outrider.lm.__file__).parent / "cpu" / "kernels"
    emulation = Path(__file__).parent / "amx_emulation.h"
    with tempfile.TemporaryDirectory() as directory:
        built = Path(directory) / "amx.so"
        command = [
            "cc",
            *_FLAGS,
            f'-DEMULATED_TILES="{emulation}"',
            *(str(source / name) for name in _SOURCES),
            "-lm",
        ]
        subprocess.run([*command, "-o", str(built)], check=True)
        return ctypes.CDLL(str(built))
