"""Chooses a drafter's cores and memory, checks them against the machine, and pins it to them.

The topology is read from /sys. Its root is a parameter, so that tests can use a tree that was
recorded on another machine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import invalid
from outrider.process.settings.cores import format_cores, parse_cores
from outrider.protocol.model_info import Placement

GRACE = "grace"
"""The value of `cores` that stands for the cores of a Grace CPU."""
_MPOL_BIND = 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
# Implementer (bits 31-24) and part (bits 15-4) in Arm's main id register: Arm Ltd. and Neoverse V2,
# the core of Grace.
_NEOVERSE_V2 = (0x41, 0xD4F)


@dataclass(frozen=True, slots=True)
class Topology:
    """The machine's cores and NUMA nodes.

    `online` has the numbers of the usable cores, `nodes` the cores of each NUMA node (none for a
    node of GPU memory). `not_grace` is None on a Grace CPU, else it says why the CPU is not Grace.
    """

    online: list[int]
    nodes: dict[int, list[int]]
    not_grace: str | None

    @classmethod
    def read(cls, sys_root: Path) -> Topology:
        """Read the topology below `sys_root`.

        Raises OutriderError(INVALID_VALUE) if the tree has no list of cores.
        """
        system = sys_root / "devices/system"
        online = _read(system / "cpu/online")
        if not online:
            path = system / "cpu/online"
            raise invalid("cores", f"needs the list of cores in {path}, which is missing")
        nodes = {
            int(path.name.removeprefix("node")): parse_cores(_read(path / "cpulist"))
            for path in sorted(system.glob("node/node[0-9]*"))
        }
        return cls(parse_cores(online), nodes, _not_grace(sys_root))


def _read(path: Path) -> str:
    """Return the file's text; empty if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _not_grace(sys_root: Path) -> str | None:
    """Return why the CPU is not Grace; None on a Grace CPU.

    Other makers use the core Neoverse V2 too, so the maker's name is checked as well.
    """
    register = _read(sys_root / "devices/system/cpu/cpu0/regs/identification/midr_el1")
    if not register:
        return "the processor is not an Arm one"
    midr = int(register, 16)
    if (midr >> 24 & 0xFF, midr >> 4 & 0xFFF) != _NEOVERSE_V2:
        return f"the processor's id {register} is not that of a Neoverse V2"
    names = " ".join(
        _read(sys_root / "class/dmi/id" / name)
        for name in ("sys_vendor", "board_vendor", "product_name")
    )
    if not any(word in names.upper() for word in ("NVIDIA", "GRACE", "GB200", "GH200")):
        machine = names.strip() or "nothing"
        return f"the Neoverse V2 cores are in a machine that calls itself {machine}, not NVIDIA's"
    return None


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """A placement that was checked. `threads` is None where torch should choose their number."""

    kind: str
    cores: tuple[int, ...]
    numa_node: int | None
    threads: int | None

    def apply(self) -> None:
        """Pin this process to its cores and bind its memory. Call it before torch is imported.

        Raises OutriderError(INVALID_VALUE) if the system refuses.
        """
        if self.cores:
            try:
                os.sched_setaffinity(0, self.cores)
            except OSError as cause:
                refused = f"the system refuses ({cause.strerror}); is it a container's limit?"
                message = f"cannot be {format_cores(list(self.cores))}: {refused}"
                raise invalid("cores", message) from cause
        if self.numa_node is not None:
            _bind_memory(self.numa_node)
        if self.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(self.threads)

    def describe(self, device: str, gpu_uuid: str = "") -> Placement:
        """Return the placement in the form for the drafter's Hello.

        `device` is the device that computes.
        """
        return Placement(
            self.kind,
            platform.node(),
            device,
            self.cores,
            self.numa_node,
            platform.machine(),
            gpu_uuid,
        )


def _bind_memory(node: int) -> None:
    """Bind memory that this process touches from now on to one NUMA node.

    Calls set_mempolicy(MPOL_BIND). Raises OutriderError(INVALID_VALUE) if the system refuses.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise invalid("numa_node", f"cannot be bound on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    if libc.syscall(number, _MPOL_BIND, words, ctypes.c_ulong(len(words) * 64 + 1)) != 0:
        reason = os.strerror(ctypes.get_errno())
        message = f"set_mempolicy says {reason}; a container needs CAP_SYS_NICE for it"
        raise invalid("numa_node", f"cannot be {node}: {message}")


def plan(
    cores: str | None,
    numa_node: int | None,
    threads: int | None,
    sys_root: Path = Path("/sys"),
) -> PlacementPlan:
    """Check the settings of a placement against the topology.

    Without cores and node, the system places the process (`local`). With cores, the process runs on
    these cores; with a node alone, on all cores of the node (both are `cpu`). `grace` stands for
    the cores of a Grace CPU's node, by default of the first node that has cores. Raises
    OutriderError(INVALID_VALUE) that names the setting at fault and the possible values.
    """
    if cores is None and numa_node is None:
        return PlacementPlan("local", (), None, threads)
    topology = Topology.read(sys_root)
    kind = "cpu"
    if cores == GRACE:
        if topology.not_grace is not None:
            raise invalid("cores", f"cannot be grace: {topology.not_grace}")
        kind, cores = GRACE, None
        if numa_node is None:
            numa_node = min(node for node, its_cores in topology.nodes.items() if its_cores)
    available = _available(topology, numa_node)
    chosen = parse_cores(cores) if cores is not None else available
    missing = sorted(set(chosen) - set(available))
    if missing or not chosen:
        where = f"NUMA node {numa_node}" if numa_node is not None else "this machine"
        raise invalid("cores", f"must be among {format_cores(available)} of {where}, not {cores}")
    if threads is not None and threads > len(chosen):
        raise invalid("threads", f"must be at most the {len(chosen)} cores, not {threads}")
    return PlacementPlan(kind, tuple(chosen), numa_node, threads or len(chosen))


def _available(topology: Topology, numa_node: int | None) -> list[int]:
    """Return the online cores of the node, or of the machine.

    Raises OutriderError if there is no such node, or if the node has no online cores.
    """
    if numa_node is None:
        return topology.online
    if numa_node not in topology.nodes:
        choices = ", ".join(map(str, topology.nodes)) or "(none)"
        raise invalid("numa_node", f"must be one of {choices}, not {numa_node}")
    cores = [core for core in topology.nodes[numa_node] if core in topology.online]
    if not cores:
        others = ", ".join(str(node) for node, cores in topology.nodes.items() if cores)
        message = f"{numa_node} has no cores, as a GPU's memory has none"
        raise invalid("numa_node", f"{message}; nodes with cores: {others}")
    return cores


def choose_address(verifier: str, uds: Path | None) -> str:
    """Return the address to dial: the Unix socket `uds` if it accepts connections, else `verifier`.

    A Unix socket costs less than TCP. Raises OutriderError(INVALID_VALUE) if the path exists and is
    not a socket.
    """
    if uds is None:
        return verifier
    try:
        if not stat.S_ISSOCK(uds.stat().st_mode):
            raise invalid("uds", f"must be a Unix socket, which {uds} is not")
        with socket.socket(socket.AF_UNIX) as probe:
            # A blocking probe would wait for a stopped verifier with too many waiting connections.
            probe.setblocking(False)
            probe.connect(str(uds))
    except OSError:
        return verifier
    return f"unix:{uds}"
