"""Runs the walk-throughs of docs/drafters.md and docs/placement.md, with other ports."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from outrider.process.network.ports import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/drafters.md").read_text()
SECTION = PAGE.partition("## Your own, in any language\n")[2].partition("\n## ")[0]
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def script() -> str:
    """Return all commands of the section."""
    return "\n".join(["set -euo pipefail", *BLOCK.findall(SECTION)])


def with_ports(text: str) -> str:
    """Return the commands with free ports in place of the default ports."""
    http, verifier = (str(free_port("127.0.0.1")) for _ in range(2))
    ports = f"serve --grpc-port 0 --http-port {http} --verifier-port {verifier}"
    return (
        text.replace("outrider serve", f"outrider {ports}", 1)
        .replace(":8000", f":{http}")
        .replace(":50051", f":{verifier}")
    )


def run_commands(commands: str, tmp_path: Path, timeout_s: float, **variables: str) -> str:
    """Run commands in a directory with the repository's layout; return their output."""
    for name in ("examples", "protos", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/outrider").write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m outrider_cli.main "$@"\n'
    )
    (tmp_path / ".venv/bin/outrider").chmod(0o755)
    with (tmp_path / "log").open("w") as log:
        shell = subprocess.Popen(
            ["bash", "-c", commands],
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        )
        try:
            code = shell.wait(timeout_s)
        finally:
            # The commands may leave servers running in the shell's session.
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
    printed = (tmp_path / "log").read_text()
    assert code == 0, printed
    return printed


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="the page installs Debian packages")
def test_the_first_drafter_walkthrough_ends_with_accepted_tokens(tmp_path: Path) -> None:
    printed = run_commands(with_ports(script()), tmp_path, 180)
    # The servers may log on the line of the answer.
    answer, _ = json.JSONDecoder().raw_decode(printed[printed.index('{"id":"cmpl') :])
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 20


@pytest.mark.slow
def test_the_placement_walkthrough_ends_with_a_table_of_places(tmp_path: Path) -> None:
    """Most of the time goes into measuring a profile; with a small target this takes less time."""
    page = (ROOT / "docs/placement.md").read_text()
    _, _, section = page.partition("## Choose a place\n")
    section, _, _ = section.partition("\n## ")
    experiment = (ROOT / "bench/experiments/places.yaml").read_text()
    file = tmp_path / "places.yaml"
    file.write_text(experiment.replace("{model: models/target", "{model: models/draft"))
    commands = "\n".join(["set -euo pipefail", *BLOCK.findall(section)])
    commands = commands.replace("bench/experiments/places.yaml", str(file))
    printed = run_commands(commands, tmp_path, 600, OUTRIDER_PROFILE_TARGET="models/draft")
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    places = ("target-cores", "other-cores", "other-host", "ngram-other-cores")
    cells = {(line.split()[1], line.split()[3]) for line in lines}
    assert cells == {(place, batch) for place in places for batch in ("1", "8", "32")}, printed
    assert all("measured" in line for line in lines), printed
