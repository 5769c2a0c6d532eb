"""Reads and writes lists of cores in Linux' syntax."""

from __future__ import annotations

from outrider.errors import invalid


def parse_cores(text: str, field: str = "cores") -> list[int]:
    """Read Linux' cpulist syntax, such as `0-3,8`, into sorted core numbers.

    Raises OutriderError(INVALID_VALUE) that names `field` and shows the wrong text.
    """
    cores: set[int] = set()
    for part in text.strip().split(",") if text.strip() else []:
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise invalid(field, f"must be a list such as 0-3,8, not {text!r}")
        begin = int(first)
        end = int(last or first)
        if end < begin or end > 65_535:
            raise invalid(field, f"must hold rising ranges of cores below 65536, not {part!r}")
        cores.update(range(begin, end + 1))
    return sorted(cores)


def format_cores(cores: list[int]) -> str:
    """Write sorted core numbers in the same syntax, such as `0-3,8`."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
