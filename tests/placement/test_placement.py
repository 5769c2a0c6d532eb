"""Placement is chosen from the topology, checked against it, and applied before torch is loaded."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.placement import PlacementPlan, choose_address, plan
from outrider.errors import OutriderError
from outrider.process.settings.cores import format_cores, parse_cores
from tests.sys_trees import gh200, graviton4, tree

GRACE_MIDR = "0x00000000410fd4f0"


def two_sockets(root: Path) -> Path:
    return tree(root, "0-31", {0: "0-7,16-23", 1: "8-15,24-31"})


@given(st.sets(st.integers(0, 300), max_size=40))
def test_a_list_of_cores_is_the_same_after_writing_and_reading(cores: set[int]) -> None:
    assert parse_cores(format_cores(sorted(cores))) == sorted(cores)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1,,2", "0x3", "0-99999"])
def test_an_invalid_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(OutriderError) as caught:
        parse_cores(text)
    assert caught.value.field == "cores"


@pytest.mark.parametrize("driver_manages", [False, True])
def test_on_a_gh200_the_drafter_takes_all_cores_and_no_gpu_memory(
    tmp_path: Path, driver_manages: bool
) -> None:
    root = gh200(tmp_path, driver_manages=driver_manages)
    assert plan("grace", None, None, root) == PlacementPlan("grace", tuple(range(72)), 0, 72)
    assert plan(None, 0, None, root).cores == tuple(range(72))
    for node in range(1, 9):
        reason = "must be one of 0, not" if driver_manages else "a GPU's memory has none"
        with pytest.raises(OutriderError, match=reason):
            plan("grace", node, None, root)


def test_among_four_gh200_the_drafter_takes_the_cores_of_one(tmp_path: Path) -> None:
    root = gh200(tmp_path, boards=4)
    assert plan("grace", None, None, root).cores == tuple(range(72))
    last = plan("grace", 3, None, root)
    assert (last.cores, last.numa_node, last.threads) == (tuple(range(216, 288)), 3, 72)
    with pytest.raises(OutriderError, match=r"nodes with cores: 0, 1, 2, 3"):
        plan("grace", 4, None, root)


def test_graviton_4_has_grace_s_core_but_its_nodes_are_named(tmp_path: Path) -> None:
    root = graviton4(tmp_path / "two", sockets=2)
    with pytest.raises(OutriderError, match="calls itself Amazon EC2, not NVIDIA's"):
        plan("grace", None, None, root)
    second = plan(None, 1, None, root)
    assert second == PlacementPlan("cpu", tuple(range(96, 192)), 1, 96)
    one = graviton4(tmp_path / "one", sockets=1)
    assert plan(None, 0, 16, one) == PlacementPlan("cpu", tuple(range(96)), 0, 16)


@pytest.mark.parametrize(
    ("midr", "vendor", "reason"),
    [
        ("", "", "the processor is not an Arm one"),
        ("0x00000000410fd0c1", "NVIDIA", "is not that of a Neoverse V2"),
        (GRACE_MIDR, "", "in a machine that calls itself nothing"),
    ],
)
def test_grace_is_refused_with_the_reason_on_other_machines(
    tmp_path: Path, midr: str, vendor: str, reason: str
) -> None:
    with pytest.raises(OutriderError, match=reason) as caught:
        plan("grace", None, None, tree(tmp_path, "0-63", {0: "0-63"}, midr, vendor))
    assert caught.value.field == "cores"


def test_a_node_stands_for_its_cores_and_cores_for_themselves(tmp_path: Path) -> None:
    root = two_sockets(tmp_path)
    assert plan(None, 1, None, root).cores == (*range(8, 16), *range(24, 32))
    assert plan("3,5", None, None, root).threads == 2


@pytest.mark.parametrize(
    ("cores", "node", "threads", "field", "message"),
    [
        ("30-40", None, None, "cores", "must be among 0-31 of this machine, not 30-40"),
        ("0-9", 0, None, "cores", "must be among 0-7,16-23 of NUMA node 0, not 0-9"),
        (None, 7, None, "numa_node", "must be one of 0, 1, not 7"),
        ("0-1", None, 3, "threads", "must be at most the 2 cores, not 3"),
    ],
)
def test_absent_cores_and_nodes_are_refused_with_the_present_ones(
    tmp_path: Path,
    cores: str | None,
    node: int | None,
    threads: int | None,
    field: str,
    message: str,
) -> None:
    with pytest.raises(OutriderError, match=message) as caught:
        plan(cores, node, threads, two_sockets(tmp_path))
    assert caught.value.field == field


def test_without_cores_and_node_nothing_is_pinned() -> None:
    chosen = plan(None, None, 2)
    assert (chosen.kind, chosen.cores, chosen.threads) == ("local", (), 2)


def test_a_process_is_pinned_before_torch_is_imported() -> None:
    core = max(os.sched_getaffinity(0))
    program = f"""
import json, os, sys
from drafter_svc.placement import plan
chosen = plan("{core}", None, None)
chosen.apply()
early = "torch" in sys.modules
import torch
place = chosen.describe("cpu")
cores = sorted(os.sched_getaffinity(0))
print(json.dumps([early, cores, torch.get_num_threads(), list(place.cores), place.kind]))
"""
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == [False, [core], 1, [core], "cpu"]


def test_a_unix_socket_whose_owner_accepts_nothing_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "verifier.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(2)
        found = [choose_address("host:1", path) for _ in range(8)]
    assert found[0] == f"unix:{path}"
    assert found[-1] == "host:1"


def test_only_a_unix_socket_that_answers_replaces_the_address(tmp_path: Path) -> None:
    path = tmp_path / "verifier.sock"
    assert choose_address("host:1", None) == "host:1"
    assert choose_address("host:1", path) == "host:1"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert choose_address("host:1", path) == f"unix:{path}"
    assert choose_address("host:1", path) == "host:1"
    path.unlink()
    path.write_text("")
    with pytest.raises(OutriderError, match="must be a Unix socket"):
        choose_address("host:1", path)
