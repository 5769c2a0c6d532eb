"""Real Redis servers on ports of their own: one, Sentinel's, or a cluster's, with and without TLS, as an operator has them.

The user `outrider` has the rights that docs/operations.md gives it; the tests look on as the default user, who may do anything.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import redis

from drafter_svc.pools.redis_server import RedisServer

OPERATIONS = (Path(__file__).parents[2] / "docs/operations.md").read_text()
PASSWORD = "correct horse"
SERVICE = "pool"


def acl_line(kind: str) -> str:
    """The user's rights as documented, for `data` servers or for a `sentinel`."""
    lines: list[str] = re.findall(r"^user outrider .*$", OPERATIONS, re.MULTILINE)
    [line] = [line for line in lines if ("sentinel|" in line) == (kind == "sentinel")]
    return line


def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Certificates:
    """An authority, and a certificate of 127.0.0.1 that it signed."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.ca, self.key, self.certificate = (
            directory / name for name in ("ca.crt", "server.key", "server.crt")
        )
        ca_key = directory / "ca.key"
        new = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            "2",
        ]
        of_server = [
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-addext",
            "basicConstraints=CA:FALSE",
        ]
        for arguments in (
            [*new, "-keyout", ca_key, "-out", self.ca, "-subj", "/CN=authority"],
            [
                *new,
                "-CA",
                self.ca,
                "-CAkey",
                ca_key,
                "-keyout",
                self.key,
                "-out",
                self.certificate,
                "-subj",
                "/CN=server",
                *of_server,
            ],
        ):
            subprocess.run(arguments, check=True, capture_output=True)


class RedisProcess:
    """May be killed and started again on the same port."""

    def __init__(
        self,
        directory: Path,
        *directives: str,
        tls: Certificates | None = None,
        sentinel: bool = False,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._tls = tls
        self._command = [
            "redis-server",
            str(directory / "redis.conf"),
            *(["--sentinel"] if sentinel else []),
        ]
        binary = shutil.which("redis-server")
        assert binary, "redis-server is missing; `make test` installs it"
        user = acl_line("sentinel" if sentinel else "data").replace(">PASSWORD", f'">{PASSWORD}"')
        lines = ["bind 127.0.0.1", f"dir {directory}", *directives, user]
        if tls is not None:
            lines += [
                f"port 0\ntls-port {self.port}\ntls-auth-clients no\ntls-replication yes\ntls-cluster yes"
            ]
            lines += [
                f"tls-cert-file {tls.certificate}\ntls-key-file {tls.key}\ntls-ca-cert-file {tls.ca}"
            ]
        else:
            lines += [f"port {self.port}"]
        if not sentinel:
            lines += ['save ""', "repl-diskless-sync-delay 0"]
        (directory / "redis.conf").write_text("\n".join(lines) + "\n")
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        with self.admin() as client:
            until(lambda: _answers(client))

    def admin(self) -> redis.Redis:
        tls = {"ssl": True, "ssl_ca_certs": str(self._tls.ca)} if self._tls else {}
        return redis.Redis(port=self.port, host="127.0.0.1", protocol=2, **tls)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


class Deployment:
    """Redis of one topology; `data` are the servers that take writes at first."""

    kind = ""

    def __init__(self, directory: Path, tls: Certificates | None = None) -> None:
        self.tls = tls
        self.password_file = directory / "password"
        self.password_file.parent.mkdir(parents=True, exist_ok=True)
        self.password_file.write_text(PASSWORD + "\n")
        self.processes: list[RedisProcess] = []
        self.data: list[RedisProcess] = []

    def run(self, directory: Path, *directives: str, sentinel: bool = False) -> RedisProcess:
        process = RedisProcess(directory, *directives, tls=self.tls, sentinel=sentinel)
        self.processes.append(process)
        return process

    def asked(self) -> Iterable[RedisProcess]:
        """The processes whose addresses stand in the URL."""
        return self.data

    @property
    def url(self) -> str:
        addresses = ",".join(f"127.0.0.1:{process.port}" for process in self.asked())
        return f"{'rediss' if self.tls else 'redis'}{self.kind}://outrider@{addresses}"

    @property
    def server(self) -> RedisServer:
        return RedisServer.parse(self.url, self.password_file, self.tls.ca if self.tls else None)

    def flags(self) -> list[str]:
        """The same for a process."""
        flags = ["--redis", self.url, "--redis-password-file", str(self.password_file)]
        return flags + (["--redis-ca-file", str(self.tls.ca)] if self.tls else [])

    def each(self, *command: str) -> list[Any]:
        """What each server that takes writes says, as the default user."""
        said = []
        for process in self.data:
            with process.admin() as client:
                said.append(client.execute_command(*command))
        return said

    def all_keys(self) -> list[bytes]:
        return [key for keys in self.each("KEYS", "*") for key in keys]

    def close(self) -> None:
        for process in self.processes:
            process.kill()


class Standalone(Deployment):
    def __init__(self, directory: Path, tls: Certificates | None = None, *directives: str) -> None:
        super().__init__(directory, tls)
        self.data = [self.run(directory / "server", *directives)]

    def kill(self) -> None:
        self.data[0].kill()

    def start(self) -> None:
        self.data[0].start()


class Sentinels(Deployment):
    """A master, a replica, and a sentinel that needs no other's consent; it asks for a password as well."""

    kind = "+sentinel"

    def __init__(self, directory: Path, tls: Certificates | None = None) -> None:
        super().__init__(directory, tls)
        master = self.run(directory / "master")
        self.data = [master]
        self.replica = self.run(directory / "replica", f"replicaof 127.0.0.1 {master.port}")
        with self.replica.admin() as client:
            until(lambda: client.info("replication")["master_link_status"] == "up")
        self.sentinel = self.run(
            directory / "sentinel",
            f"sentinel monitor {SERVICE} 127.0.0.1 {master.port} 1",
            f"sentinel down-after-milliseconds {SERVICE} 300",
            f"sentinel failover-timeout {SERVICE} 2000",
            sentinel=True,
        )
        with self.sentinel.admin() as client:
            until(lambda: client.info("sentinel")["master0"]["slaves"] == 1)

    def asked(self) -> Iterable[RedisProcess]:
        return [self.sentinel]

    @property
    def url(self) -> str:
        return f"{super().url}/{SERVICE}?sentinel_auth=true"


class Cluster(Deployment):
    """Three masters that share the slots, without replicas."""

    kind = "+cluster"

    def __init__(self, directory: Path, tls: Certificates | None = None) -> None:
        super().__init__(directory, tls)
        self._directory = directory
        self._buses: dict[int, int] = {}
        self.data = [self._node() for _ in range(3)]
        bounds = [0, 5461, 10923, 16384]
        for number, node in enumerate(self.data):
            with node.admin() as client:
                client.execute_command(
                    "CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1
                )
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.data[1:]:
            self._meet(node)
        until(lambda: all(self.is_whole(node) for node in self.data))

    def _node(self) -> RedisProcess:
        number, bus = len(self.processes), free_port()
        directives = ["cluster-enabled yes", f"cluster-port {bus}", "cluster-node-timeout 1000"]
        node = self.run(self._directory / f"node{number}", *directives)
        self._buses[node.port] = bus
        return node

    def _meet(self, node: RedisProcess) -> None:
        with self.data[0].admin() as client:
            client.execute_command(
                "CLUSTER", "MEET", "127.0.0.1", node.port, self._buses[node.port]
            )

    def grow(self) -> RedisProcess:
        """A new node that has no slots, once all know of it."""
        node = self._node()
        self._meet(node)
        self.data.append(node)
        until(
            lambda: all(
                self.is_whole(each) and self.knows(each) == len(self.data) for each in self.data
            )
        )
        return node

    def knows(self, node: RedisProcess) -> int:
        """How many nodes a node knows of, itself included."""
        with node.admin() as client:
            return int(client.cluster("info")["cluster_known_nodes"])

    def is_whole(self, node: RedisProcess) -> bool:
        """Whether a node knows of all slots and all nodes."""
        with node.admin() as client:
            said = client.cluster("info")
            return said["cluster_state"] == "ok" and said["cluster_size"] == "3"
