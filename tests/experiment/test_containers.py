"""The compose file of an experiment has a service for each process and a network for each link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from outrider.errors import OutriderError
from outrider_bench.experiment.compose_file import (
    FILES_DIRECTORY,
    Images,
    Service,
    Subnets,
    compose_file,
)
from outrider_bench.experiment.containers import Project, bridge_address
from outrider_bench.experiment.hosts import Launch, LocalHost
from outrider_bench.experiment.places import Places
from outrider_bench.experiment.remote import Hosts

VERIFIER = Launch(
    "verifier-1",
    "verifier_svc",
    ("--listen", "10.213.0.2:20000"),
    cores="0-1",
    shares=(Path("/models"),),
)
GATEWAY = Launch("gateway-1", "gateway", ("--verifier", "10.213.0.2:20000"))
LINK_MODULE = "outrider_bench.experiment.link_process"
LINK = Launch("link-wire", LINK_MODULE, ("--forward", "10.213.1.3:20000=10.213.0.2:20000"))
NGRAM = Launch(
    "near-1", "drafter_svc", ("--family", "ngram", "--verifier", "10.213.1.3:20000", "--cores", "1")
)
MODEL = Launch("far-1", "drafter_svc", ("--family", "model", "--verifier", "10.213.0.2:20000"))
REDIS = Launch("redis", "", ("--requirepass", "a$b"), program="redis-server")


def services(*launches: Launch, **more: Any) -> dict[str, dict[str, Any]]:
    """The services that are written for these processes, each alone in the network core."""
    subnets = Subnets()
    placed = [
        Service(launch, {"core": subnets.address("core", i + 1)}, **more)
        for i, launch in enumerate(launches)
    ]
    written: dict[str, dict[str, Any]] = yaml.safe_load(compose_file(placed, subnets, Images()))[
        "services"
    ]
    return written


def project(directory: Path) -> Project:
    """A project whose engine is never asked."""
    return Project(directory, ["docker-compose"], httpx.AsyncClient(), Images(), "172.17.0.1")


def places(found: Project | None, *, compose: bool) -> Places:
    return Places(Hosts(), found, compose, {})


def test_each_process_runs_in_the_image_that_has_it() -> None:
    images = {
        name: service["image"]
        for name, service in services(VERIFIER, GATEWAY, LINK, NGRAM, MODEL, REDIS).items()
    }
    assert images == {
        "verifier-1": "outrider-verifier:dev",
        "gateway-1": "outrider-gateway:dev",
        "link-wire": "outrider-drafter-ngram:dev",
        "near-1": "outrider-drafter-ngram:dev",
        "far-1": "outrider-drafter-model:dev",
        "redis": "redis:7-bookworm",
    }


def test_a_family_that_no_image_has_is_refused() -> None:
    with pytest.raises(OutriderError, match="near-1 runs drafter_svc suffix, which is in no image"):
        services(Launch("near-1", "drafter_svc", ("--family", "suffix")))


def test_a_container_can_write_nothing_and_gain_no_rights() -> None:
    for service in services(VERIFIER, REDIS).values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "cap_add" not in service


def test_a_container_has_the_cores_that_the_launch_or_the_drafter_names() -> None:
    written = services(VERIFIER, NGRAM, MODEL)
    found = {name: service.get("cpuset") for name, service in written.items()}
    assert found == {"verifier-1": "0-1", "near-1": "1", "far-1": None}


def test_memory_of_a_numa_node_needs_the_one_capability_for_it() -> None:
    launch = Launch(
        "far-1", "drafter_svc", ("--family", "model", "--cores", "0", "--numa-node", "0")
    )
    assert services(launch)["far-1"]["cap_add"] == ["SYS_NICE"]


def test_a_process_on_a_gpu_has_that_gpu_and_the_image_for_it() -> None:
    service = services(Launch("far-1", "drafter_svc", ("--family", "model", "--device", "cuda:1")))[
        "far-1"
    ]
    [device] = service["deploy"]["resources"]["reservations"]["devices"]
    assert service["image"] == "outrider-drafter-model-gpu:dev"
    assert device["device_ids"] == ["1"]


def test_arguments_reach_the_process_as_they_are() -> None:
    """Compose would take the word behind a dollar sign for a variable."""
    assert services(REDIS)["redis"]["entrypoint"] == ["redis-server", "--requirepass", "a$$b"]


def test_shared_directories_keep_their_path_and_files_are_read_only(tmp_path: Path) -> None:
    launch = Launch(
        "near-1",
        "drafter_svc",
        ("--family", "ngram", "--pool-secret-file", "{files}/secret"),
        shares=(tmp_path,),
    )
    service = services(launch, files=tmp_path)["near-1"]
    assert service["entrypoint"][-1] == f"{FILES_DIRECTORY}/secret"
    shared, files = service["volumes"]
    assert shared == {"type": "bind", "source": str(tmp_path), "target": str(tmp_path)}
    assert files == {
        "type": "bind",
        "source": str(tmp_path),
        "target": FILES_DIRECTORY,
        "read_only": True,
    }


def test_a_container_finds_a_relative_path_where_the_caller_has_it() -> None:
    launch = Launch(
        "verifier-1", "verifier_svc", ("--target", "models/target"), shares=(Path("models/target"),)
    )
    service = services(launch)["verifier-1"]
    [shared] = service["volumes"]
    assert shared["source"] == shared["target"] == f"{service['working_dir']}/models/target"


class Recorded(Project):
    """Writes the compose file, and starts nothing."""

    async def _run(self, *words: str) -> str:
        return ""

    async def _id_of(self, name: str) -> str:
        return f"id of {name}"


async def small_stack(directory: Path) -> dict[str, Any]:
    """The compose file of a verifier, its gateway, a link, and a drafter on each of its sides."""
    found = Recorded(directory, ["docker-compose"], httpx.AsyncClient(), Images(), "172.17.0.1")
    where = places(found, compose=True)
    verifier = where.host("verifier-1", None, False)
    address = f"{verifier.address}:{await verifier.free_port()}"
    await verifier.start(Launch("verifier-1", "verifier_svc", ("--listen", address)))
    await verifier.start(Launch("gateway-1", "gateway", ("--verifier", address)))
    link = where.host("link-wire", None, False)
    front = f"{link.address}:{await link.free_port()}"
    await link.start(Launch("link-wire", LINK_MODULE, ("--forward", f"{front}={address}")))
    for name, dialled in (("far-1", front), ("near-1", address)):
        launch = Launch(name, "drafter_svc", ("--family", "ngram", "--verifier", dialled))
        await where.host(name, None, False).start(launch)
    written: dict[str, Any] = yaml.safe_load(found.path.read_text())
    return written


async def test_a_drafter_behind_a_link_reaches_nothing_but_the_link(tmp_path: Path) -> None:
    written = await small_stack(tmp_path)
    networks = {
        name: set(service.get("networks", {})) for name, service in written["services"].items()
    }
    assert networks == {
        "verifier-1": {"core"},
        "gateway-1": set(),
        "link-wire": {"wire", "core"},
        "far-1": {"wire"},
        "near-1": {"core"},
    }
    assert set(written["networks"]) == {"core", "wire"}


async def test_a_gateway_shares_the_address_of_its_verifier(tmp_path: Path) -> None:
    written = await small_stack(tmp_path)
    assert written["services"]["gateway-1"]["network_mode"] == "service:verifier-1"


async def test_no_two_containers_have_the_same_address(tmp_path: Path) -> None:
    written = await small_stack(tmp_path)
    placed = [
        network["ipv4_address"]
        for s in written["services"].values()
        for network in s.get("networks", {}).values()
    ]
    assert len(placed) == len(set(placed)) == 5


async def test_one_container_beside_processes_is_on_the_network_of_the_machine(
    tmp_path: Path,
) -> None:
    found = Recorded(tmp_path, ["docker-compose"], httpx.AsyncClient(), Images(), "172.17.0.1")
    where = places(found, compose=False)
    assert isinstance(where.host("verifier-1", None, False), LocalHost)
    host = where.host("near-1", None, True)
    assert host.address == "127.0.0.1"
    await host.start(NGRAM)
    assert yaml.safe_load(found.path.read_text())["services"]["near-1"]["network_mode"] == "host"


async def test_files_of_a_launch_are_for_this_user_alone(tmp_path: Path) -> None:
    found = Recorded(tmp_path, ["docker-compose"], httpx.AsyncClient(), Images(), "172.17.0.1")
    directory = found.write_files(Launch("near-1", "drafter_svc", files={"secret": "of the pool"}))
    assert directory is not None
    assert (directory / "secret").read_text() == "of the pool"
    assert directory.stat().st_mode & 0o077 == 0


def test_containers_beside_other_machines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="--with compose keeps all processes on this one"):
        places(project(tmp_path), compose=True).host("near-1", "far", False)
    with pytest.raises(OutriderError, match="ssh starts processes alone"):
        places(None, compose=False).host("near-1", "far", True)


def test_more_containers_than_a_network_has_addresses_are_refused() -> None:
    with pytest.raises(OutriderError, match="make more than 250 containers: number 251"):
        Subnets().address("core", 251)


@pytest.mark.parametrize("gateway", [{}, {"Gateway": "172.17.0.1"}])
async def test_the_machines_address_is_found_before_the_engine_says_it(
    gateway: dict[str, str],
) -> None:
    network = {"IPAM": {"Config": [{"Subnet": "172.17.0.0/16", **gateway}]}}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=network))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as engine:
        assert await bridge_address(engine) == "172.17.0.1"
