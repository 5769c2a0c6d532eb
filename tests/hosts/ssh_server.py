"""Helpers of tests with other machines: OpenSSH's server on loopback, and a light process."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path

import pytest
from waiting import until

from outrider.process.network.ports import free_port
from outrider_bench.experiment.hosts import Launch
from outrider_bench.experiment.machine import commit
from outrider_bench.experiment.remote import RemoteHost, remote_hosts

OUTRIDER = (sys.executable, "-m", "outrider_cli.main")
ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0
_PRIVILEGE_SEPARATION = Path("/run/sshd")


@dataclass
class SshServer:
    """A running server. `target` is this checkout behind it, for the system's ssh."""

    process: asyncio.subprocess.Process
    target: str


def _prepare(folder: Path) -> None:
    """Make the keys of the server and of the user, and the directory that the server asks for."""
    for name in ("host", "user"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True)
    _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)


@asynccontextmanager
async def ssh_server(folder: Path) -> AsyncIterator[SshServer]:
    """Serve ssh on a free port of the loopback interface, for this user and one key.

    Until the context ends, PATH begins with a directory whose `ssh` has the options for the server.
    """
    await asyncio.to_thread(_prepare, folder)
    port = free_port("127.0.0.1")
    # The checkout of the tests need not be this process's home, so its modules are named here.
    settings = [
        f"ListenAddress 127.0.0.1:{port}",
        f"HostKey {folder / 'host'}",
        f"AuthorizedKeysFile {folder / 'user.pub'}",
        f"PidFile {folder / 'sshd.pid'}",
        "StrictModes no",
        "UsePAM no",
        f"SetEnv PYTHONPATH={ROOT}",
    ]
    (folder / "sshd_config").write_text("\n".join(settings) + "\n")
    # It starts itself anew for each connection, and so must be named by its full path.
    server = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    assert server is not None, "tests/install-tools.sh installs openssh-server"
    process = await asyncio.create_subprocess_exec(
        server, "-D", "-e", "-f", str(folder / "sshd_config"), stderr=asyncio.subprocess.DEVNULL
    )
    options = ["-p", str(port), "-i", str(folder / "user"), "-oIdentitiesOnly=yes"]
    options += ["-oStrictHostKeyChecking=no", f"-oUserKnownHostsFile={folder / 'known'}"]
    client = shutil.which("ssh")
    assert client is not None, "tests/install-tools.sh installs openssh-client"
    programs = folder / "programs"
    programs.mkdir()
    script = programs / "ssh"
    command = shlex.join([client, "-F", "none", *options])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    try:
        await until(lambda: listens(port))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(programs), prepend=os.pathsep)
            yield SshServer(process, f"{getuser()}@127.0.0.1:{ROOT}")
    finally:
        process.kill()
        await process.wait()


def held(server: SshServer) -> AbstractAsyncContextManager[dict[str, RemoteHost]]:
    """The machine behind the server, as the host `near`."""
    return remote_hosts({"near": server.target}, commit(ROOT))


def proxy(name: str = "proxy", **more: object) -> tuple[Launch, int]:
    """A light process of Outrider, and the port that it listens on while it runs."""
    control, listen = free_port("127.0.0.1"), free_port("127.0.0.1")
    forward = f"127.0.0.1:{listen}=127.0.0.1:1"
    arguments = ("--control", f"127.0.0.1:{control}", "--forward", forward)
    return Launch(name, "outrider_bench.experiment.link_process", arguments, **more), control


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
