"""Energy that the machine says it used: of processors by RAPL, of GPUs by NVML. Where no counter can be read, there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")


@dataclass(slots=True)
class Meter:
    """Joules between two readings. RAPL's counters start again from zero at their range, which is made up for once.

    A package's counter includes its cores'; those of DRAM are added where they are of their own. See
    https://docs.kernel.org/power/powercap/powercap.html and NVML's nvmlDeviceGetTotalEnergyConsumption.
    """

    root: Path = _POWERCAP
    _before: dict[str, int] = field(default_factory=dict)
    """Microjoules by counter."""

    def start(self) -> None:
        """Read the counters."""
        self._before = self._read()

    def joules(self) -> float | None:
        """Since `start`; None where there is no counter that this user may read."""
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
            continue  # for root alone, on most systems


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
