"""A real redis-server for each test that asks, on a port of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis


class RedisServer:
    """May be killed and started again on the same port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        binary = shutil.which("redis-server")
        assert binary, "redis-server is missing; `make test` installs it"
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._directory)]
        self._process = subprocess.Popen([binary, *arguments], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        with redis.Redis(port=self.port) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.ConnectionError:
                    assert time.monotonic() < deadline
                    time.sleep(0.02)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()
