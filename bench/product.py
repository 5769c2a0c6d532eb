"""Compare the product of a CPU decoder with a streaming read of the same weights, in turns.

    python bench/product.py [LIBRARY...]

A LIBRARY is a build of the C kernels; by default the build that this processor uses. A product of
few rows can at best take as long as the read.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable

import torch

from outrider.lm.cpu.library import library
from outrider.lm.cpu.weights import LinearStruct, in_huge_pages

IN, OUT = 896, 172_032
"""Weights of 308 MB in bfloat16, which no cache holds."""
TURNS = 40


def seconds(call: Callable[[], object]) -> float:
    """Time a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def product(
    found: ctypes.CDLL, weights: torch.Tensor, x: torch.Tensor, out: torch.Tensor
) -> Callable[[], object]:
    """A call of a library's product."""
    function = found.outrider_bfloat16_product
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (ctypes.POINTER(LinearStruct), pointer, number, pointer)
    function.restype = None
    linear = LinearStruct(weights.data_ptr(), None, IN, OUT)
    return lambda: function(linear, x.data_ptr(), len(x), out.data_ptr())


def main() -> None:
    """Print the medians of each number of rows."""
    libraries: dict[str, ctypes.CDLL | None]
    libraries = {path: ctypes.CDLL(path) for path in sys.argv[1:]} or {"": library()}
    weights = in_huge_pages(torch.Size((OUT, IN)), torch.bfloat16).fill_(0.01)
    words = weights.view(torch.int64)
    for rows in (1, 2, 4, 5, 8):
        x = torch.ones(rows, IN, dtype=torch.bfloat16)
        out = torch.empty(rows, OUT, dtype=torch.bfloat16)
        calls: dict[str, Callable[[], object]] = {"read": lambda: words.max()}
        for path, found in libraries.items():
            if found is not None:
                calls[f"product {path}"] = product(found, weights, x, out)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(TURNS):
            for name, call in calls.items():
                times[name].append(seconds(call))
        read = statistics.median(times["read"])
        for name, some in times.items():
            first, median, third = statistics.quantiles(some, n=4)
            print(
                f"{rows} rows  {1e3 * median:6.2f} ms ({1e3 * first:.2f} to {1e3 * third:.2f})  "
                f"{read / median:.2f} of the read's speed  {name}"
            )


if __name__ == "__main__":
    main()
