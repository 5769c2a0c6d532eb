"""The C of this directory: a library for each kind of processor, built on installation where there is a C compiler."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from importlib.util import find_spec

import torch

log = logging.getLogger(__name__)

# The libraries by what torch says of the processor; each can do what those before it can.
_BUILDS = {"DEFAULT": "_cpu", "AVX2": "_cpu_avx2", "AVX512": "_cpu_avx512"}
_AVX512_BFLOAT16 = "_cpu_avx512_bf16"
_AMX = "_cpu_amx"


@cache
def library() -> ctypes.CDLL | None:
    """The best build that this processor can run; None when none was built."""
    for name in runnable_builds():
        found = load_build(name)
        if found is not None:
            return found
    log.warning(
        "the code for CPUs was not built, for want of a C compiler at installation; decoding is slower"
    )
    return None


def runnable_builds() -> list[str]:
    """Names of the builds that this processor can run, best first."""
    capabilities = list(_BUILDS)
    mine = torch.backends.cpu.get_cpu_capability()
    last = capabilities.index(mine) if mine in capabilities else 0
    names = [_BUILDS[capability] for capability in reversed(capabilities[: last + 1])]
    if _can("_is_avx512_bf16_supported"):
        names.insert(0, _AVX512_BFLOAT16)
    # The kernel of the system has to let this process use the tile registers.
    if _can("_is_amx_tile_supported") and _can("_init_amx"):
        names.insert(0, _AMX)
    return names


@cache
def _can(question: str) -> bool:
    """What torch answers; older torches do not tell."""
    ask = getattr(torch.cpu, question, None)
    return ask is not None and bool(ask())


def prefix(dtype: torch.dtype) -> str:
    """What the names of `decoder.c` for such weights begin with; there are bfloat16 and float32."""
    return f"outrider_{str(dtype).removeprefix('torch.')}_"


def load_build(name: str) -> ctypes.CDLL | None:
    """One build; None when it was not built."""
    found = find_spec(f"outrider.lm.cpu.{name}")
    if found is None or found.origin is None:
        return None
    # Torch is there already, and so the library gets the OpenMP that torch has, and its threads.
    return ctypes.CDLL(found.origin)
