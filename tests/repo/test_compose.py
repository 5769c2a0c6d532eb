"""compose.yaml and stack.yaml: limits and rights of every service, and settings that exist."""

import os
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafter_svc.config import settings_schema
from drafter_svc.families.registry import known_families
from drafter_svc.placement import PlacementPlan, plan
from gateway.config import GatewaySettings
from outrider.process.settings.config import Settings
from outrider_cli.verifier import VerifierWithDraftersSettings
from tests.sys_trees import gb200, gh200

COMPOSE = Path(__file__).parents[2] / "compose"
TEXT = (COMPOSE / "compose.yaml").read_text()
TLS_TEXT = (COMPOSE / "tls.yaml").read_text()
EGRESS_TEXT = (COMPOSE / "egress.yaml").read_text()
STACK_TEXT = (COMPOSE / "stack.yaml").read_text()
STACK: dict[str, dict[str, Any]] = yaml.safe_load(STACK_TEXT)["services"]
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
MORE: dict[str, dict[str, Any]] = {
    **SERVICES,
    **yaml.safe_load((COMPOSE / "two-verifiers.yaml").read_text())["services"],
    "gateway": SERVICES["gateway"],
}
"""The services of compose.yaml and two-verifiers.yaml.

The gateway is compose.yaml's: two-verifiers.yaml states only the gateway's environment.
"""
SETTINGS: dict[str, list[type[Settings]]] = {
    "VERIFIER": [VerifierWithDraftersSettings],
    "DRAFTER": [settings_schema(family) for family in known_families()],
    "GATEWAY": [GatewaySettings],
}


@pytest.mark.parametrize("name", MORE)
def test_every_service_is_read_only_unprivileged_and_limited(name: str) -> None:
    service = MORE[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    # set_mempolicy needs SYS_NICE.
    added = ["SYS_NICE"] if name == "drafter-grace" else []
    assert service.get("cap_add", []) == added
    assert service["pids_limit"] > 0
    assert not service.get("privileged")


@pytest.mark.parametrize(
    "board",
    [gh200, partial(gh200, driver_manages=True), partial(gh200, boards=4), gb200],
    ids=["gh200", "gh200 with CDMM", "four gh200", "gb200"],
)
def test_the_profile_grace_pins_a_whole_cpu_and_its_own_memory(
    board: Callable[[Path], Path], tmp_path: Path
) -> None:
    service = SERVICES["drafter-grace"]
    given = service["environment"]
    cores = re.fullmatch(r"\$\{OUTRIDER_DRAFTER_CORES:-(.*)\}", given["OUTRIDER_DRAFTER_CORES"])
    assert cores is not None
    assert given["OUTRIDER_DRAFTER_NUMA_NODE"] is None
    chosen = plan(cores[1], None, None, board(tmp_path))
    assert chosen == PlacementPlan("grace", tuple(range(72)), 0, 72)
    # Docker must not take cores or time away. The image is for the architecture of Grace.
    assert not service.keys() & {"cpuset", "cpus", "cpu_quota"}
    assert service["platform"] == "linux/arm64"
    # The process has a thread on each core, and the threads of gRPC, telemetry and torch.
    assert service["pids_limit"] >= 2 * len(chosen.cores)
    assert given["THP_MEM_ALLOC_ENABLE"] == "1"


def users_of_stages() -> dict[str, str]:
    """Return the last USER of each stage of the Dockerfile, or of the stage's base stage.

    A base image's user counts as root.
    """
    users: dict[str, str] = {}
    stage = ""
    for line in (COMPOSE / "Dockerfile").read_text().splitlines():
        if found := re.match(r"FROM (\S+) AS (\S+)", line):
            stage = found[2]
            users[stage] = users.get(found[1], "root")
        elif found := re.match(r"USER (\S+)", line):
            users[stage] = found[1]
    return users


@pytest.mark.parametrize("service", [*MORE.values(), *STACK.values()], ids=[*MORE, *STACK])
def test_no_service_runs_as_root(service: dict[str, Any]) -> None:
    """Images of other projects may change their user, so the services set the user for these."""
    image = service["image"].removeprefix("${OUTRIDER_REGISTRY:-}").partition(":")[0]
    targets = {
        other["image"].partition(":")[0]: other["build"]["target"]
        for other in SERVICES.values()
        if "build" in other
    }
    user = service.get("user") or users_of_stages()[targets[image]]
    assert re.match("[1-9][0-9]*:", user), user


def test_tls_changes_nothing_of_a_services_rights() -> None:
    services: dict[str, dict[str, Any]] = yaml.safe_load(TLS_TEXT)["services"]
    keys = {key for service in services.values() for key in service}
    assert keys == {"environment", "volumes", "command", "healthcheck"}


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {"secrets", "redis-cluster-join"}))
def test_every_long_lived_service_has_a_memory_limit_and_restarts(name: str) -> None:
    assert SERVICES[name]["mem_limit"]
    assert SERVICES[name]["restart"] == "unless-stopped"


def test_compose_waits_longer_than_any_process_drains() -> None:
    drains = [
        schema.model_fields["drain_seconds"].default
        for schema in (VerifierWithDraftersSettings, GatewaySettings)
    ]
    for service in (*SERVICES.values(), *STACK.values()):
        assert float(service["stop_grace_period"].removesuffix("s")) > max(drains)


def test_prometheus_reaches_the_metrics_of_every_image_that_has_a_port_for_them() -> None:
    """Metrics are served on the host of the setting `listen`."""
    text = (COMPOSE / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if "_METRICS_PORT=" in line]
    assert len(lines) == 3
    assert [line for line in lines if not re.search(r"_LISTEN=0\.0\.0\.0:\d+ ", line)] == []


def test_ports_are_published_on_loopback_by_default() -> None:
    services = [*SERVICES.values(), *yaml.safe_load(EGRESS_TEXT)["services"].values()]
    ports = [port for service in services for port in service.get("ports", [])]
    assert len(ports) >= 3
    loopback = re.compile(r"\$\{OUTRIDER_(VERIFIER_)?BIND:-127\.0\.0\.1\}:")
    assert [port for port in ports if not loopback.match(port)] == []


def networks(service: dict[str, Any]) -> set[str]:
    """Return the networks that a service is on."""
    if service.get("network_mode") == "none":
        return set()
    return set(service.get("networks", ["default"]))


@pytest.mark.parametrize("text", [TEXT, STACK_TEXT], ids=["compose.yaml", "stack.yaml"])
def test_only_services_with_published_ports_reach_anything_outside(text: str) -> None:
    """If an attacker makes a verifier or a drafter open connections, these reach nothing."""
    document = yaml.safe_load(text)
    closed = {
        name for name, options in document["networks"].items() if (options or {}).get("internal")
    }
    services = MORE if text is TEXT else STACK
    with_ports = {name for name, service in services.items() if service.get("ports")}
    with_a_way_out = {name for name, service in services.items() if networks(service) - closed}
    assert with_a_way_out == with_ports
    assert not [name for name in with_ports if re.match("verifier|drafter|redis|secrets", name)]


def test_only_redis_and_ngram_drafters_share_secrets_and_a_network() -> None:
    with_secrets = {
        name
        for name, service in SERVICES.items()
        if any("/run/outrider/secrets" in v for v in service.get("volumes", []))
    }
    assert all(name.startswith(("redis", "secrets", "drafter-ngram")) for name in with_secrets)
    in_pool = {name for name, service in SERVICES.items() if "pool" in service.get("networks", [])}
    assert in_pool == with_secrets - {"secrets"}


def test_every_variable_is_a_setting_of_its_process() -> None:
    files = TEXT + TLS_TEXT + STACK_TEXT + EGRESS_TEXT + (COMPOSE / "Dockerfile").read_text()
    variable = r"^ +(?:ENV )?OUTRIDER_(VERIFIER|DRAFTER|GATEWAY)_([A-Z_]+)[:=]"
    named = set(re.findall(variable, files, re.MULTILINE))
    assert len(named) > 20
    known = {
        process: {name for schema in schemas for name in schema.model_fields}
        for process, schemas in SETTINGS.items()
    }
    assert [name for process, name in named if name.lower() not in known[process]] == []


def test_every_variable_is_in_the_readme() -> None:
    files = TEXT + TLS_TEXT + STACK_TEXT + EGRESS_TEXT
    variables = set(re.findall(r"\$\{([A-Z_]+):-", files))
    variables |= set(re.findall(r"^ +([A-Z_]+):$", TEXT, re.MULTILINE))
    readme = (COMPOSE / "README.md").read_text()
    assert [name for name in variables if f"`{name}`" not in readme] == []


def test_with_tls_every_service_gets_the_files_of_its_own_role_alone() -> None:
    services: dict[str, dict[str, Any]] = yaml.safe_load(TLS_TEXT)["services"]
    own = {name for name in SERVICES if re.match(r"gateway|verifier|drafter", name)}
    assert set(services) == own | {"redis", "prometheus"}
    for name, service in services.items():
        role = "operator" if name == "prometheus" else name.partition("-")[0]
        text = str(service)
        if name == "prometheus":
            text += (COMPOSE / "observability/prometheus-tls.yaml").read_text()
        [volume] = [volume for volume in service["volumes"] if "OUTRIDER_CERTS" in volume]
        assert volume == f"${{OUTRIDER_CERTS:-./certs}}/{role}:/run/outrider/certs:ro"
        named = set(re.findall(r"/run/outrider/certs/([a-z.]+)", text))
        assert named == {"ca.pem", f"{role}.pem", f"{role}.key"}


@pytest.mark.parametrize("name", STACK)
def test_every_service_of_the_stack_is_read_only_unprivileged_and_limited(name: str) -> None:
    service = STACK[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    resources = service["deploy"]["resources"]
    assert resources["limits"]["memory"]
    assert resources["limits"]["pids"] > 0
    # Swarm places a task only where this much memory is free.
    assert resources["reservations"]["memory"]


@pytest.mark.parametrize("name", STACK)
def test_every_service_of_the_stack_gets_the_secrets_of_its_own_role_alone(name: str) -> None:
    role = name.partition("-")[0]
    secrets = STACK[name]["secrets"]
    with_roles = {secret for secret in secrets if secret.endswith((".pem", ".key"))}
    assert with_roles == {"ca.pem", f"{role}.pem", f"{role}.key"}
    assert set(secrets) <= yaml.safe_load(STACK_TEXT)["secrets"].keys()
    named = set(re.findall(r"/run/secrets/([a-z_.]+)", str(STACK[name]["environment"])))
    assert named <= set(secrets)


@pytest.mark.parametrize("name", ["gateway", "drafter-ngram", "drafter-model"])
def test_swarm_ends_no_container_that_waits_for_verifiers(name: str) -> None:
    """Swarm ends containers whose health check fails."""
    assert STACK[name]["healthcheck"] == {"disable": True}


@pytest.mark.parametrize(
    ("target", "is_there", "started"),
    [
        ("grown/target-154m", False, ["outrider_bench.grow", "outrider_cli.verifier"]),
        ("grown/target-154m", True, ["outrider_cli.verifier"]),
        ("models/llama-8b", False, ["outrider_cli.verifier"]),
    ],
)
def test_a_verifier_makes_the_default_target_once(
    target: str, is_there: bool, started: list[str], tmp_path: Path
) -> None:
    service = SERVICES["verifier"]
    assert service["environment"]["OUTRIDER_VERIFIER_TARGET"].endswith(":-grown/target-154m}")
    (tmp_path / "models/target").mkdir(parents=True)
    weights = tmp_path / "models/target/model.safetensors"
    weights.touch()
    if is_there:
        (tmp_path / "grown/target-154m").mkdir(parents=True)
        config = tmp_path / "grown/target-154m/config.json"
        config.touch()
        os.utime(weights, (1.0, 1.0))
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$2"\n')
    python.chmod(0o755)
    command = [*service["entrypoint"], service["command"][0].replace("$$", "$")]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUTRIDER_VERIFIER_TARGET": target}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == started
