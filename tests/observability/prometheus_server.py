"""Runs the real Prometheus with the shipped configuration and rules."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen

import yaml

from outrider.process.network.ports import free_port
from tests.stack import ROOT

SHIPPED = ROOT / "compose/observability"


@contextmanager
def prometheus(
    directory: Path, targets: Mapping[str, list[int]], *, at_once: bool = False
) -> Iterator[str]:
    """Run Prometheus with the shipped configuration; yield its URL.

    The ports of `targets` replace host names, which only Compose resolves, and the intervals are
    shorter than those shipped. With `at_once`, an alert fires as soon as its condition holds.
    """
    config = yaml.safe_load((SHIPPED / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        addresses = [f"127.0.0.1:{port}" for port in targets[job["job_name"]]]
        job["static_configs"] = [{"targets": addresses}]
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    rules = yaml.safe_load((SHIPPED / "rules.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if at_once:
                rule.pop("for", None)
    (directory / "rules.yaml").write_text(yaml.safe_dump(rules))
    port = free_port()
    binary = shutil.which("prometheus")
    assert binary is not None, "no Prometheus on this machine; `make test` installs one"
    flags = [f"--config.file={directory}/prometheus.yaml", f"--storage.tsdb.path={directory}/data"]
    command = [binary, *flags, f"--web.listen-address=127.0.0.1:{port}"]
    with Popen(command, stdout=DEVNULL, stderr=DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
