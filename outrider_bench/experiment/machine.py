"""Describes the machine that measures: its hardware, its load and the commit that it runs.

Of an experiment, this module uses only the cores, NUMA nodes and GPUs.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import time
import timeit
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from drafter_svc.placement import Topology
from outrider.errors import invalid
from outrider_bench.experiment.child import check_cores
from outrider_bench.experiment.records import Machine
from outrider_bench.experiment.spec import Experiment, drafters_of

_BUSY_LOAD = 0.3
"""Runnable processes per core above which a machine is called busy."""
_STEAL = 0.02
_SPREAD_SIZE = 256
_WATCH_S = 1.0
_STAT_NAMES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


def this_machine() -> Machine:
    """Describe this machine."""
    return Machine(
        host=platform.node(),
        processor=processor_name(),
        cores=sorted(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=_gpus(),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=metadata.version("torch") if find_spec("torch") is not None else "",
    )


def processor_name() -> str:
    """Return the model name that Linux gives; without one, the architecture (`aarch64`).

    Kernels of a lesser processor, if OUTRIDER_CPU_KERNELS names them, are part of the name.
    """
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = platform.machine() if found is None else found.group(1).strip()
    kernels = os.environ.get("OUTRIDER_CPU_KERNELS")
    return f"{name} with the kernels {kernels}" if kernels else name


def commit(root: Path) -> str:
    """Return twelve digits of the checkout's commit, with +DIGEST if there are uncommitted changes.

    Return `none` outside a checkout.
    """
    head = _git(root, "rev-parse", "HEAD")
    if not head:
        return "none"
    changes = _git(root, "diff", "HEAD", "--binary")
    # New files count as well, ignored files do not.
    new = _git(root, "ls-files", "--others", "--exclude-standard").splitlines()
    digest = hashlib.sha256(changes.encode())
    for name in sorted(new):
        digest.update(name.encode())
        if (root / name).is_file():
            digest.update((root / name).read_bytes())
    if not changes and not new:
        return head[:12]
    return f"{head[:12]}+{digest.hexdigest()[:8]}"


def check(experiment: Experiment) -> None:
    """Raise OutriderError(INVALID_VALUE) for a core, NUMA node or GPU that is not here.

    The error names the field of the experiment's file.
    """
    nodes = Topology.read(Path("/sys")).nodes
    gpu_count = len(_gpus())
    check_cores("target.cores", experiment.target.cores)
    for name, drafter in drafters_of(experiment):
        check_cores(f"drafters.{name}.cores", drafter.cores)
        if drafter.numa_node is not None and drafter.numa_node not in nodes:
            known = ", ".join(map(str, nodes)) or "(none)"
            problem = f"must be one of {known}, not {drafter.numa_node}"
            raise invalid(f"drafters.{name}.numa_node", problem)
        wanted = int(drafter.device.partition(":")[2] or 0)
        if drafter.device.startswith("cuda") and wanted >= gpu_count:
            problem = f"{drafter.device} is not here; GPUs: {gpu_count}"
            raise invalid(f"drafters.{name}.device", problem)


def spread() -> float:
    """Repeat a computation for a second; return its times' 90th percentile over their median."""
    data = np.ones((_SPREAD_SIZE, _SPREAD_SIZE))
    times: list[float] = []
    while sum(times) < _WATCH_S:
        times.append(timeit.timeit(lambda: data @ data, number=1))
    return float(np.quantile(times, 0.9) / np.median(times))


def warnings() -> Iterator[str]:
    """Watch the machine for a second; yield reasons to doubt measurements that begin now."""
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
        known = ", ".join(sorted(governors))
        yield f"cores change their clock: the governor is {known}, not performance"


def _gpus() -> list[str]:
    if find_spec("torch") is None:
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _git(root: Path, *words: str) -> str:
    """Return Git's output; empty without git or a checkout."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=False)
    except OSError:
        return ""
    if done.returncode != 0:
        return ""
    return done.stdout.decode(errors="replace").strip()


def _cpu_times() -> dict[str, int]:
    """Return the ticks of all cores, keyed by kind of work, from /proc/stat (proc_stat(5))."""
    first, *_ = Path("/proc/stat").read_text().splitlines()
    return dict(zip(_STAT_NAMES, map(int, first.split()[1 : 1 + len(_STAT_NAMES)]), strict=True))
