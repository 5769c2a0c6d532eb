"""The machine that measures: what it has, whether it is quiet, and which code it runs.

Knows no experiment but for the cores, NUMA nodes and GPUs that one asks for.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from bench.experiment.hosts import check_cores
from bench.experiment.records import Machine
from bench.experiment.spec import Experiment, drafters_of
from drafter_svc.placement import Topology
from outrider.errors import invalid

_READ_BYTES = 256 << 20
_READ_COUNT = 3
_BUSY_LOAD = 0.3
"""Processes that want to run, over cores, above which a machine is called busy."""
_STEAL = 0.02
_WATCH_S = 1.0
_STAT_NAMES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


def this_machine() -> Machine:
    """What this machine has; reads 256 MiB a few times to see how fast its memory is."""
    topology = Topology.read(Path("/sys"))
    return Machine(
        host=platform.node(),
        processor=_processor(),
        cores=sorted(os.sched_getaffinity(0)),
        numa_nodes=topology.nodes,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_bytes_per_s=_memory_bytes_per_s(),
        gpus=_gpus(),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=metadata.version("torch") if find_spec("torch") is not None else "",
    )


def commit(root: Path) -> str:
    """The checkout's commit, 12 digits of it, and +DIGEST of all that is not committed; `none` outside a checkout."""
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return "none"
    changes = _git(root, "diff", "HEAD", "--binary")
    # New files count as well; what git ignores does not.
    new = _git(root, "ls-files", "--others", "--exclude-standard").splitlines()
    digest = hashlib.sha256(changes.encode())
    for name in sorted(new):
        digest.update(name.encode())
        if (root / name).is_file():
            digest.update((root / name).read_bytes())
    return head[:12] + (f"+{digest.hexdigest()[:8]}" if changes or new else "")


def check(experiment: Experiment) -> None:
    """Raises OutriderError(INVALID_VALUE) that names the field of the file that asks for what this machine lacks."""
    nodes = Topology.read(Path("/sys")).nodes
    gpu_count = len(_gpus())
    if experiment.target.host is None:
        check_cores("target.cores", experiment.target.cores)
    for name, drafter in drafters_of(experiment):
        if drafter.host is not None:
            continue
        check_cores(f"drafters.{name}.cores", drafter.cores)
        if drafter.numa_node is not None and drafter.numa_node not in nodes:
            known = ", ".join(map(str, nodes)) or "(none)"
            raise invalid(
                f"drafters.{name}.numa_node", f"must be one of {known}, not {drafter.numa_node}"
            )
        wanted = int(drafter.device.partition(":")[2] or 0)
        if drafter.device.startswith("cuda") and wanted >= gpu_count:
            raise invalid(
                f"drafters.{name}.device", f"{drafter.device} is not here; GPUs: {gpu_count}"
            )


def warnings() -> Iterator[str]:
    """What makes measurements here doubtful now; watches the machine for a second."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    if load > _BUSY_LOAD * cores:
        yield f"the machine is busy: {load:.1f} processes ran in the last minute, on {cores} cores"
    before = _cpu_times()
    time.sleep(_WATCH_S)
    after = _cpu_times()
    spent = {name: after[name] - before[name] for name in _STAT_NAMES}
    whole = max(sum(spent.values()), 1)
    if spent["steal"] > _STEAL * whole:
        yield f"the hypervisor takes {spent['steal'] / whole:.0%} of the cores' time (steal)"
    governors = {
        path.read_text().strip()
        for path in Path("/sys").glob("devices/system/cpu/cpu*/cpufreq/scaling_governor")
    }
    if governors - {"performance"}:
        yield f"cores change their clock: the governor is {', '.join(sorted(governors))}, not performance"


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1) if found else platform.machine()


def _memory_bytes_per_s() -> float:
    """Of one thread that sums up an array which no cache holds; the fastest of a few."""
    data = np.ones(_READ_BYTES // 8)
    seconds = []
    for _ in range(_READ_COUNT):
        started = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - started)
    return _READ_BYTES / min(seconds)


def _gpus() -> list[str]:
    if find_spec("torch") is None:
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _git(root: Path, *words: str) -> str:
    """What git says; empty where it is not installed or there is no checkout."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=False)
    except OSError:
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""


def _cpu_times() -> dict[str, int]:
    """Ticks of all cores by what they did, from /proc/stat (proc_stat(5))."""
    first, *_ = Path("/proc/stat").read_text().splitlines()
    return dict(zip(_STAT_NAMES, map(int, first.split()[1 : 1 + len(_STAT_NAMES)]), strict=True))
