"""Loads the library of C kernels that suits the processor.

The installation builds one library for each kind of processor, if there is a C compiler.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from functools import cache
from importlib.util import find_spec

import torch

from outrider.errors import invalid

log = logging.getLogger(__name__)

# Maps a processor's capability, as torch names it, to the name of its library. A processor can run
# its own library and all libraries listed before it.
_BUILDS = {"DEFAULT": "_cpu", "AVX2": "_cpu_avx2", "AVX512": "_cpu_avx512"}
_AVX512_BFLOAT16 = "_cpu_avx512_bf16"
_AMX = "_cpu_amx"
_AMX_NEEDS = ("amx_tile", "amx_bf16", "amx_int8")
# The entries of a process's auxiliary vector in which Linux names an ARM processor's capabilities.
AT_HWCAP = 16
AT_HWCAP2 = 26
HWCAP_ASIMDDP = 1 << 20
"""ARM's dot products of int8."""
HWCAP2_I8MM = 1 << 13
"""ARM's matrix products of int8."""
HWCAP2_BF16 = 1 << 14
"""ARM's products of bfloat16; Linux sets this bit only if bfdot, bfmmla and bfcvt are all there."""
# Maps each ARM library, the best first, to the capabilities that it needs in these two entries. All
# known processors with products of bfloat16 have the matrix products of int8, too.
_ARM_BUILDS = {
    "_cpu_arm_bf16": (0, HWCAP2_BF16 | HWCAP2_I8MM),
    "_cpu_arm_dot": (HWCAP_ASIMDDP, 0),
}
# Equal to the constant `outrider_layout` of the C sources.
LAYOUT = 2

SETTING = "OUTRIDER_CPU_KERNELS"
"""The environment variable that names the build to load, for tests and benchmarks: `default`,
`avx2`, `avx512`, `avx512_bf16`, `amx`, `arm_dot` or `arm_bf16`."""


@cache
def library() -> ctypes.CDLL | None:
    """Load the best build that this processor can run; None if none was built.

    Raises OutriderError if OUTRIDER_CPU_KERNELS names a build that is missing, or that this
    processor cannot run.
    """
    wanted = os.environ.get(SETTING)
    if wanted:
        return _load_wanted(wanted)
    for name in runnable_builds():
        found = load_build(name)
        if found is not None:
            return found
    log.warning(
        "decoding is slow: there are no C kernels for this CPU; install Outrider again, with a C "
        "compiler"
    )
    return None


def _load_wanted(wanted: str) -> ctypes.CDLL:
    runnable = {
        name.removeprefix("_cpu").lstrip("_") or "default": name for name in runnable_builds()
    }
    if wanted not in runnable:
        here = ", ".join(runnable)
        raise invalid(SETTING, f"is {wanted!r}, but this processor can run only: {here}")
    found = load_build(runnable[wanted])
    if found is None:
        raise invalid(SETTING, f"is {wanted!r}, but installation did not build these kernels")
    log.info("the CPU kernels are those of %s, as %s says", wanted, SETTING)
    return found


def runnable_builds() -> list[str]:
    """Return the names of the builds that this processor can run, best first."""
    capabilities = list(_BUILDS)
    mine = torch.backends.cpu.get_cpu_capability()
    last = capabilities.index(mine) if mine in capabilities else 0
    names = [_BUILDS[capability] for capability in reversed(capabilities[: last + 1])]
    names[:0] = _arm_builds()
    if _can("_is_avx512_bf16_supported"):
        names.insert(0, _AVX512_BFLOAT16)
    # A virtual machine may hide parts of AMX. `_init_amx` asks the operating system to let this
    # process use the tile registers.
    if _has_amx() and _can("_init_amx"):
        names.insert(0, _AMX)
    return names


def _has_amx() -> bool:
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is None:
        return _can("_is_amx_tile_supported")
    has = ask()
    return all(has.get(name) for name in _AMX_NEEDS)


@cache
def _can(question: str) -> bool:
    """Ask torch whether the processor has a capability; False if this torch lacks the function."""
    ask = getattr(torch.cpu, question, None)
    return ask is not None and bool(ask())


def _arm_builds() -> list[str]:
    """Return an ARM processor's own builds, best first; torch's names for ARM do not say enough."""
    if platform.machine() != "aarch64":
        return []
    has, has2 = _auxiliary(AT_HWCAP), _auxiliary(AT_HWCAP2)
    return [
        name
        for name, (needs, needs2) in _ARM_BUILDS.items()
        if has & needs == needs and has2 & needs2 == needs2
    ]


def _auxiliary(entry: int) -> int:
    """Read an entry of Linux's auxiliary vector. Each architecture has its own meaning of bits."""
    ask = ctypes.CDLL(None).getauxval
    ask.argtypes, ask.restype = (ctypes.c_ulong,), ctypes.c_ulong
    return int(ask(entry))


def prefix(numbers: str) -> str:
    """Return the prefix of `decoder.c`'s names for weights in bfloat16, float32 or int8."""
    return f"outrider_{numbers}_"


def load_build(name: str) -> ctypes.CDLL | None:
    """Load one build; return None if it is missing or has other structures than ours."""
    found = find_spec(f"outrider.lm.cpu.{name}")
    if found is None or found.origin is None:
        return None
    # Torch is loaded already, so the library shares torch's OpenMP runtime and its threads.
    build = ctypes.CDLL(found.origin)
    if not _has_our_layout(build):
        log.warning("%s is of another version: install Outrider again", found.origin)
        return None
    return build


def _has_our_layout(build: ctypes.CDLL) -> bool:
    """True if a build has the structures and the order of weights of these Python sources."""
    try:
        return ctypes.c_int64.in_dll(build, "outrider_layout").value == LAYOUT
    except ValueError:
        return False
