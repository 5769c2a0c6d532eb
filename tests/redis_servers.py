"""Real Redis servers and clusters, on free ports, with and without TLS.

The user `outrider` has the rights that docs/operations.md gives it. Tests inspect the servers as
the default user, who has all rights.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import redis

from outrider.process.network.ports import free_port
from outrider.process.redis.server import RedisServer
from tests.certificates import Site
from tests.waiting import wait_until

OPERATIONS = (Path(__file__).parents[1] / "docs/operations.md").read_text()
PASSWORD = "correct horse"


def acl_line() -> str:
    """Return the documented line with the user's rights."""
    [line] = re.findall(r"^user outrider .*$", OPERATIONS, re.MULTILINE)
    return str(line)


class Certificates(Site):
    """An authority, and a certificate for 127.0.0.1 that it signed."""

    def __init__(self, folder: Path, *, clients: bool = False) -> None:
        """`clients` says whether a server asks its clients for certificates."""
        super().__init__(folder)
        self.clients = clients
        own = self.issue("redis")
        self.key = own.key
        self.certificate = own.cert


class RedisProcess:
    """A server that can be killed and started again on the same port."""

    def __init__(
        self,
        directory: Path,
        *directives: str,
        tls: Certificates | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._tls = tls
        self._command = ["redis-server", str(directory / "redis.conf")]
        assert shutil.which("redis-server"), "redis-server is missing; `make test` installs it"
        user = acl_line().replace(">PASSWORD", f'">{PASSWORD}"')
        lines = ["bind 127.0.0.1", f"dir {directory}", *directives, user, 'save ""']
        (directory / "redis.conf").write_text("\n".join([*lines, *self._port_lines()]) + "\n")
        self.start()

    def _port_lines(self) -> list[str]:
        if self._tls is None:
            return [f"port {self.port}"]
        return [
            "port 0",
            f"tls-port {self.port}",
            f"tls-auth-clients {'yes' if self._tls.clients else 'no'}",
            "tls-cluster yes",
            f"tls-cert-file {self._tls.certificate}",
            f"tls-key-file {self._tls.key}",
            f"tls-ca-cert-file {self._tls.ca}",
        ]

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        with self.admin() as client:
            wait_until(lambda: _answers(client))

    def admin(self) -> redis.Redis:
        """Return a client of the default user."""
        tls: dict[str, Any] = {}
        if self._tls is not None:
            tls = {"ssl": True, "ssl_ca_certs": str(self._tls.ca)}
            tls |= {"ssl_certfile": self._tls.certificate, "ssl_keyfile": self._tls.key}
        return redis.Redis(port=self.port, host="127.0.0.1", protocol=2, **tls)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


class Deployment:
    """One server or a cluster. `data` has the servers."""

    is_cluster = False

    def __init__(self, directory: Path, tls: Certificates | None = None) -> None:
        self.tls = tls
        self.password_file = directory / "password"
        self.password_file.parent.mkdir(parents=True, exist_ok=True)
        self.password_file.write_text(PASSWORD + "\n")
        self.processes: list[RedisProcess] = []
        self.data: list[RedisProcess] = []

    def run(self, directory: Path, *directives: str) -> RedisProcess:
        process = RedisProcess(directory, *directives, tls=self.tls)
        self.processes.append(process)
        return process

    @property
    def url(self) -> str:
        """The URLs of all servers in `data`, separated by commas."""
        scheme = "rediss" if self.tls else "redis"
        options = f"?ssl_ca_certs={self.tls.ca}" if self.tls else ""
        ports = [process.port for process in self.data]
        return ",".join(f"{scheme}://outrider@127.0.0.1:{port}{options}" for port in ports)

    def reached_with(self, password_file: Path) -> RedisServer:
        """Return the deployment's addresses, and how to log in with this password."""
        return RedisServer.parse(self.url, password_file, is_cluster=self.is_cluster)

    @property
    def server(self) -> RedisServer:
        return self.reached_with(self.password_file)

    def flags(self) -> list[str]:
        """Return the flags with which a process connects as `server` does."""
        flags = ["--redis", self.url, "--redis-password-file", str(self.password_file)]
        return [*flags, *(["--redis-cluster"] if self.is_cluster else [])]

    def each(self, *command: str) -> list[Any]:
        """Run a command as the default user on each server of `data`; return their replies."""
        replies = []
        for process in self.data:
            with process.admin() as client:
                replies.append(client.execute_command(*command))
        return replies

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


class Cluster(Deployment):
    """Three masters that share the slots, without replicas."""

    is_cluster = True

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
        wait_until(lambda: all(self.is_whole(node) for node in self.data))

    def _node(self) -> RedisProcess:
        number = len(self.processes)
        bus = free_port()
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
        """Add a node without slots, and wait until all nodes know of it."""
        node = self._node()
        self._meet(node)
        self.data.append(node)
        wait_until(lambda: all(self.is_whole(each) for each in self.data))
        wait_until(lambda: all(self.knows(each) == len(self.data) for each in self.data))
        return node

    def knows(self, node: RedisProcess) -> int:
        """Return the number of nodes that a node knows, itself included."""
        with node.admin() as client:
            return int(client.cluster("info")["cluster_known_nodes"])

    def is_whole(self, node: RedisProcess) -> bool:
        """Return whether the node knows an owner for every slot; three nodes must own the slots."""
        with node.admin() as client:
            info = client.cluster("info")
            return info["cluster_state"] == "ok" and info["cluster_size"] == "3"
