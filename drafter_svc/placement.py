"""Where a drafter runs: cores and memory chosen, checked against the machine's topology, and taken before torch starts.

The topology is read from /sys, whose root is a parameter, so that a tree recorded on another machine can be checked as well.
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
from outrider.messages import Placement
from outrider.process.cores import format_cores, parse_cores

_MPOL_BIND = 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
# Arm's main id register: implementer in bits 31-24, part in bits 15-4. Arm Ltd. and Neoverse V2, the core of Grace.
_NEOVERSE_V2 = (0x41, 0xD4F)


@dataclass(frozen=True, slots=True)
class Topology:
    """`online` cores, the cores of each NUMA node (none for a node of GPU memory), and why this is no Grace CPU, if it is not."""

    online: list[int]
    nodes: dict[int, list[int]]
    not_grace: str | None

    @classmethod
    def read(cls, sys_root: Path) -> Topology:
        """Raises OutriderError(INVALID_VALUE) when the tree has no list of cores."""
        system = sys_root / "devices/system"
        online = _read(system / "cpu/online")
        if not online:
            raise invalid(
                "placement", f"needs the list of cores in {system / 'cpu/online'}, which is missing"
            )
        nodes = {
            int(path.name.removeprefix("node")): parse_cores(_read(path / "cpulist"))
            for path in sorted(system.glob("node/node[0-9]*"))
        }
        return cls(parse_cores(online), nodes, _not_grace(sys_root))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _not_grace(sys_root: Path) -> str | None:
    """None on a Grace CPU, else the reason; other makers build on the same core, so the maker is looked at as well."""
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
        return f"the Neoverse V2 cores are in a machine that calls itself {names.strip() or 'nothing'}, not NVIDIA's"
    return None


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """A checked placement. `threads` is None where torch should choose."""

    kind: str
    cores: tuple[int, ...]
    numa_node: int | None
    threads: int | None

    def apply(self) -> None:
        """Pin this process and bind its memory; call it before torch is imported. Raises OutriderError when the system refuses."""
        if self.cores:
            try:
                os.sched_setaffinity(0, self.cores)
            except OSError as cause:
                message = f"cannot be {format_cores(list(self.cores))}: the system refuses ({cause.strerror}); is it a container's limit?"
                raise invalid("cores", message) from cause
        if self.numa_node is not None:
            _bind_memory(self.numa_node)
        if self.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(self.threads)

    def describe(self, device: str) -> Placement:
        """As the drafter's Hello says it."""
        return Placement(
            self.kind, platform.node(), device, self.cores, self.numa_node, platform.machine()
        )


def _bind_memory(node: int) -> None:
    """set_mempolicy(MPOL_BIND): all memory that this process touches from now on comes from the node."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise invalid("numa_node", f"cannot be bound on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    words = (ctypes.c_ulong * (node // 64 + 1))()
    words[node // 64] = 1 << node % 64
    if libc.syscall(number, _MPOL_BIND, words, ctypes.c_ulong(len(words) * 64 + 1)) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise invalid(
            "numa_node",
            f"cannot be {node}: set_mempolicy says {reason}; a container needs CAP_SYS_NICE for it",
        )


def plan(
    kind: str,
    cores: str | None,
    numa_node: int | None,
    threads: int | None,
    sys_root: Path = Path("/sys"),
) -> PlacementPlan:
    """Check a request against the topology; raises OutriderError(INVALID_VALUE) that names the field and what there is.

    `local` leaves the process where the system puts it, `cpu` takes what is asked for (all cores of the node, or all there are,
    unless some are named), `grace` takes a Grace CPU's own cores and memory.
    """
    if kind == "local":
        for name, value in (("cores", cores), ("numa_node", numa_node)):
            if value is not None:
                raise invalid(name, "goes with placement cpu or grace, not local")
        return PlacementPlan(kind, (), None, threads)
    topology = Topology.read(sys_root)
    if kind == "grace":
        if topology.not_grace is not None:
            raise invalid("placement", f"cannot be grace: {topology.not_grace}")
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
    if numa_node is None:
        return topology.online
    if numa_node not in topology.nodes:
        raise invalid(
            "numa_node",
            f"must be one of {', '.join(map(str, topology.nodes)) or '(none)'}, not {numa_node}",
        )
    cores = [core for core in topology.nodes[numa_node] if core in topology.online]
    if not cores:
        with_cores = [str(node) for node, its_cores in topology.nodes.items() if its_cores]
        raise invalid(
            "numa_node",
            f"{numa_node} has no cores, as a GPU's memory has none; nodes with cores: {', '.join(with_cores)}",
        )
    return cores


def choose_address(verifier: str, uds: Path | None) -> str:
    """The verifier's Unix socket when it is here to be dialled, which spares the drafter TCP; else `verifier`.

    Raises OutriderError(INVALID_VALUE) when the path is something else than a socket.
    """
    if uds is None:
        return verifier
    try:
        if not stat.S_ISSOCK(uds.stat().st_mode):
            raise invalid("uds", f"must be a Unix socket, which {uds} is not")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(uds))
    except OSError:
        return verifier
    return f"unix:{uds}"
