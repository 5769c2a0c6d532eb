"""`outrider drafter --cores grace` on a GB200 board: its system calls, and its messages."""

import ctypes
import os
import platform
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drafter_svc import placement
from drafter_svc.__main__ import main
from drafter_svc.placement import PlacementPlan, Topology
from outrider.process.settings.cores import parse_cores
from tests.sys_trees import BOARD, gb200

PIN = re.compile(r"GPU(\d)\t.*\t([\d-]+)\t(\d)\t(\d+)$", re.MULTILINE)


class Kernel:
    """Replaces the calls that pin a process, and keeps their arguments."""

    def __init__(self) -> None:
        self.cores: list[int] = []
        self.nodes: list[int] = []
        self.mode = -1

    def sched_setaffinity(self, _: int, cores: tuple[int, ...]) -> None:
        self.cores = list(cores)

    def syscall(self, number: int, mode: int, words: Any, _: object) -> int:
        assert number == placement._SET_MEMPOLICY[platform.machine()]
        self.mode = mode
        self.nodes = [bit for bit in range(64 * len(words)) if words[bit // 64] >> bit % 64 & 1]
        return 0

    @property
    def numactl(self) -> str:
        """Return the flags with which numactl would make these calls."""
        cores = placement.format_cores(self.cores)
        nodes = ",".join(map(str, self.nodes))
        return f"--physcpubind={cores} --membind={nodes}"


def _drafted(
    flags: list[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Kernel, PlacementPlan, Any]:
    """Start a drafter whose /sys is `root`; stop before it dials its verifier."""
    kernel = Kernel()
    served: list[Any] = []

    async def serve(settings: Any, place: PlacementPlan, metrics: Any) -> None:
        served.extend([place, settings])

    monkeypatch.setattr(placement, "plan", partial(placement.plan, sys_root=gb200(root)))
    monkeypatch.setattr("drafter_svc.server.serve", serve)
    # A drafter changes logging, and ends its process.
    for name in ("setup_logging", "setup", "send_spans_and_exit"):
        monkeypatch.setattr(
            f"outrider.process.observability.telemetry.{name}", lambda *_, **__: None
        )
    monkeypatch.setattr(os, "sched_setaffinity", kernel.sched_setaffinity)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: kernel)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    main(["--family", "model", "--model", "models/draft", *flags], "outrider drafter")
    [place, settings] = served
    return kernel, place, settings


@pytest.mark.parametrize(
    ("flags", "numactl", "threads"),
    [
        ([], "--physcpubind=0-71 --membind=0", 72),
        (["--numa-node", "1"], "--physcpubind=72-143 --membind=1", 72),
        (["--numa-node", "1", "--threads", "36"], "--physcpubind=72-143 --membind=1", 36),
    ],
)
def test_a_drafter_on_grace_runs_as_numactl_would_run_it(
    flags: list[str],
    numactl: str,
    threads: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, place, settings = _drafted(["--cores", "grace", *flags], tmp_path, monkeypatch)
    assert kernel.numactl == numactl
    assert kernel.mode == 2  # MPOL_BIND
    assert os.environ["OMP_NUM_THREADS"] == str(threads)
    told = place.describe(settings.device)
    assert (told.kind, told.cores, told.numa_node) == ("grace", place.cores, kernel.nodes[0])


def test_gpu_memory_is_no_place_for_a_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"numa_node 2 has no cores, as a GPU's memory has none"):
        _drafted(["--cores", "grace", "--numa-node", "2"], tmp_path, monkeypatch)


def test_the_board_s_two_views_agree(tmp_path: Path) -> None:
    nodes = Topology.read(gb200(tmp_path)).nodes
    found = PIN.findall((BOARD / "nvidia-smi-topo.txt").read_text())
    assert [gpu for gpu, *_ in found] == ["0", "1", "2", "3"]
    for _, cores, node, memory in found:
        assert nodes[int(node)] == parse_cores(cores)
        assert nodes[int(memory)] == []
