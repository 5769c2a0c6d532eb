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
_AMX = "_cpu_amx"


@cache
def library() -> ctypes.CDLL | None:
    """The best build that this processor can run; None when none was built."""
    for name in runnable_builds():
        found = load_build(name)
        if found is not None:
            return found
    log.warning("the code for CPUs was not built, for want of a C compiler at installation; decoding is slower")
    return None


def runnable_builds() -> list[str]:
    """Names of the builds that this processor can run, best first."""
    capabilities = list(_BUILDS)
    mine = torch.backends.cpu.get_cpu_capability()
    last = capabilities.index(mine) if mine in capabilities else 0
    names = [_BUILDS[capability] for capability in reversed(capabilities[: last + 1])]
    return [_AMX, *names] if _can_amx() else names


@cache
def _can_amx() -> bool:
    """Whether there are tile registers, and the kernel lets this process use them; older torches do not tell."""
    told = getattr(torch.cpu, "_is_amx_tile_supported", None), getattr(torch.cpu, "_init_amx", None)
    supported, init = told
    return supported is not None and init is not None and bool(supported()) and bool(init())


def load_build(name: str) -> ctypes.CDLL | None:
    """One build; None when it was not built."""
    found = find_spec(f"outrider.lm.{name}")
    if found is None or found.origin is None:
        return None
    # Torch is there already, and so the library gets the OpenMP that torch has, and its threads.
    return ctypes.CDLL(found.origin)
