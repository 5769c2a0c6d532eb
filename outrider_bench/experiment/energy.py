"""Reads the energy that processors (RAPL) and GPUs (NVML) used, if their counters can be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")


@dataclass(slots=True)
class Meter:
    """Joules between two readings.

    A RAPL counter restarts from zero at the end of its range; one restart is corrected. A package's
    counter includes its cores; counters of DRAM are added. Sources:
    https://docs.kernel.org/power/powercap/powercap.html, nvmlDeviceGetTotalEnergyConsumption.
    """

    root: Path = _POWERCAP
    _before: dict[str, int] = field(default_factory=dict)
    """Microjoules by counter."""

    def start(self) -> None:
        """Read the counters."""
        self._before = self._read()

    def joules(self) -> float | None:
        """Joules since `start`; None if this user can read no counter."""
        after = self._read()
        if not self._before or self._before.keys() != after.keys():
            return None
        return sum(self._used(name, after[name]) for name in after) / 1e6

    def _used(self, name: str, after: int) -> int:
        before = self._before[name]
        if after >= before:
            return after - before
        return after - before + int((self.root / name / "max_energy_range_uj").read_text())

    def _read(self) -> dict[str, int]:
        return {**dict(_processors(self.root)), **dict(_gpus())}


def _processors(root: Path) -> Iterator[tuple[str, int]]:
    for zone in root.glob("intel-rapl:*"):
        is_package = zone.name.count(":") == 1
        try:
            if is_package or (zone / "name").read_text().strip() == "dram":
                yield zone.name, int((zone / "energy_uj").read_text())
        except OSError:
            continue  # on most systems only root may read it


def _gpus() -> Iterator[tuple[str, int]]:
    if find_spec("pynvml") is None:
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return  # no driver
    for i in range(pynvml.nvmlDeviceGetCount()):
        millijoules = pynvml.nvmlDeviceGetTotalEnergyConsumption(
            pynvml.nvmlDeviceGetHandleByIndex(i)
        )
        yield f"gpu {i}", 1_000 * millijoules
