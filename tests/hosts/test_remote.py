"""Agents on other machines need mutual TLS, and an experiment runs on several machines."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest
import yaml
from agents import OUTRIDER, ROOT, agent, listens, proxy, until

from outrider.errors import OutriderError
from outrider.launch.certs import run
from outrider.process.tls import Tls
from outrider_bench.experiment.records import Folder, Measurement
from outrider_bench.experiment.remote import check_hosts, remote_hosts
from outrider_bench.experiment.spec import Experiment


def authority(directory: Path) -> Path:
    """A new directory with an authority and its certificates for an agent and an operator."""
    for kind in ("agent", "operator", "drafter"):
        assert run(directory, ["127.0.0.1"], [kind], None, 2, False) == 0
    return directory


def tls_of(directory: Path, kind: str, ca: Path | None = None) -> Tls:
    return Tls(directory / f"{kind}.pem", directory / f"{kind}.key", (ca or directory) / "ca.pem")


def flags_of(tls: Tls) -> list[str]:
    return ["--tls-cert", str(tls.cert), "--tls-key", str(tls.key), "--tls-ca", str(tls.ca)]


async def test_mutual_tls_lets_in_only_operators_of_the_authority(tmp_path: Path) -> None:
    ours, others = authority(tmp_path / "ours"), authority(tmp_path / "others")
    launch, port = proxy()
    strangers = {
        "tls-cert, tls-key and tls-ca are not given": None,
        "no authority in .* has signed": tls_of(others, "operator", ca=ours),
        "role drafter .* may not call .*HoldMachine": tls_of(ours, "drafter"),
    }
    async with agent(*flags_of(tls_of(ours, "agent"))) as near:
        addresses = {"near": near.address}
        for reason, stranger in strangers.items():
            with pytest.raises(OSError, match=f"host near: .*{reason}"):
                async with remote_hosts(addresses, stranger, near.commit):
                    pass
        async with remote_hosts(addresses, tls_of(ours, "operator"), near.commit) as hosts:
            await hosts.remote["near"].start(launch)
            await until(lambda: listens(port))


async def test_a_controller_refuses_an_agent_of_another_authority(tmp_path: Path) -> None:
    ours, others = authority(tmp_path / "ours"), authority(tmp_path / "others")
    async with agent(*flags_of(tls_of(others, "agent", ca=ours))) as near:
        with pytest.raises(OSError, match="host near: the peer's certificate is refused: unable"):
            async with remote_hosts({"near": near.address}, tls_of(ours, "operator"), near.commit):
                pass


def errors_of(*words: str) -> str:
    """The errors of an `outrider` command that refuses its arguments."""
    command = [*OUTRIDER, *words]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2, ended.stderr
    return ended.stderr


BAD_FLAGS = [
    (
        ["--listen", "0.0.0.0:7070"],
        "listen 0.0.0.0:7070 is not on loopback, so it needs mutual TLS",
    ),
    (["--listen", "7070"], "listen must be host:port with a port of at most 65535, not '7070'"),
    (["--tls-cert", "x"], "tls-key must be given too"),
    (["--tls-cert", "x", "--tls-key", "x", "--tls-ca", "x"], "tls-cert x cannot be read"),
]


@pytest.mark.parametrize(("flags", "reason"), BAD_FLAGS, ids=lambda value: str(value)[:30])
def test_an_agent_that_would_not_be_protected_does_not_start(flags: list[str], reason: str) -> None:
    errors = errors_of("agent", *flags)
    assert reason in errors
    assert len(errors.splitlines()) == 1


async def test_a_host_beyond_loopback_is_not_dialled_without_tls() -> None:
    with pytest.raises(
        OutriderError, match=r"hosts: far 10.0.0.2:7070 is not on loopback, so it needs mutual TLS"
    ):
        async with remote_hosts({"far": "10.0.0.2:7070"}, None, "abc"):
            pass


EXPERIMENT = """
name: apart
target: {threads: 1, host: near}
drafters: {far: {family: ngram, host: far, link: wire}}
links: {wire: {round_trip_ms: 2}}
workload: {kinds: [rewriting], output_tokens: 16}
use: [far]
repetitions: 1
trace: true
"""


@pytest.mark.slow
async def test_an_experiment_runs_with_verifier_and_drafter_on_two_machines(tmp_path: Path) -> None:
    file = tmp_path / "apart.yaml"
    await asyncio.to_thread(file.write_text, EXPERIMENT)
    async with agent() as far, agent() as near:
        command = [*OUTRIDER, "experiment", "run", str(file)]
        command += ["--out", str(tmp_path), "--hosts", f"far={far.address},near={near.address}"]
        running = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
        assert await asyncio.wait_for(running.wait(), 300) == 0
    found, measured = await asyncio.to_thread(results, tmp_path / "apart")
    assert set(measured) == {"plain", "drafted"}
    assert [measurement.errors for measurement in measured.values()] == [[], []]
    assert len({measurement.texts_sha256 for measurement in measured.values()}) == 1
    assert measured["drafted"].links["wire"].up_bytes > 0
    assert measured["drafted"].cpu_s["far-1"] > 0
    assert measured["drafted"].step_split_s["forward"] > 0
    assert set(found.about()["places"]) == {"far", "near"}


def results(directory: Path) -> tuple[Folder, dict[str, Measurement]]:
    """The only folder of an experiment, with the measurements of its only cell by way."""
    [about] = directory.glob("*/run.json")
    folder = Folder(about.parent)
    [cell] = folder.path.glob("cells/*")
    return folder, {
        measurement.way: measurement for _, measurement in folder.measurements(cell.name)
    }


BAD_HOSTS = [
    ("far", "hosts must be NAME=HOST:PORT with commas between them, not 'far'"),
    ("far=10.0.0.2", "hosts: far must be host:port"),
    ("far=127.0.0.1:1,far=127.0.0.1:2", "hosts name far twice"),
    ("far=127.0.0.1:1", "hosts give far, which the experiment does not name"),
]


@pytest.mark.parametrize(("hosts", "reason"), BAD_HOSTS, ids=lambda value: str(value)[:30])
def test_hosts_that_do_not_fit_the_experiment_are_refused(hosts: str, reason: str) -> None:
    file = "experiments/small.yaml"
    assert reason in errors_of("experiment", "run", file, "--hosts", hosts)


def test_a_host_of_the_experiment_without_an_address_is_named() -> None:
    named = Experiment.model_validate(yaml.safe_load(EXPERIMENT))
    with pytest.raises(
        OutriderError, match="hosts must give the address of far, which the experiment names"
    ):
        check_hosts([named], {"near": "127.0.0.1:1"})
