"""Models from a hub: a small hub on this host, a vanished hub, and no hub."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "models/target"
PRINTS_CONFIG = (
    "from outrider.tokenizer import model_file; "
    "print(model_file('org/tiny', 'config.json').read_text())"
)


class Handler(BaseHTTPRequestHandler):
    """Serves the bundled target's files as org/tiny, and no other model."""

    def do_GET(self) -> None:
        """Answer with a file and the hub's headers."""
        name = self.path.rpartition("/")[2]
        if self.path == "/":
            self._answer(200, b"", {})
        elif "org/tiny" in self.path:
            content = (TARGET / name).read_bytes()
            self._answer(200, content, {"ETag": f'"{name}"', "X-Repo-Commit": "0" * 40})
        else:
            error = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self._answer(404, b"", error)

    do_HEAD = do_GET

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(home: Path, endpoint: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the hub's cache in `home`."""
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in offline}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "NO_PROXY": "*"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def serve(home: Path, endpoint: str, target: str) -> subprocess.CompletedProcess[str]:
    ports = [word for name in ("http", "grpc", "verifier") for word in (f"--{name}-port", "0")]
    return run(home, endpoint, "-m", "outrider_cli.main", "serve", target, *ports)


def test_a_hub_model_is_read_from_the_cache_once_the_hub_is_gone(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    first = run(tmp_path, endpoint, "-c", PRINTS_CONFIG)
    assert first.stdout.strip() == (TARGET / "config.json").read_text().strip(), first.stderr
    hub.shutdown()
    hub.server_close()
    again = run(tmp_path, endpoint, "-c", PRINTS_CONFIG)
    assert again.stdout == first.stdout
    assert again.stderr == ""


def test_without_a_hub_a_missing_model_fails_at_once_in_one_line(tmp_path: Path) -> None:
    ended = serve(tmp_path, "http://127.0.0.1:1", "org/nope")
    problem = "there is no directory org/nope, and the hub cannot be reached"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"outrider serve: {problem}\n")


def test_the_error_names_a_model_that_the_hub_lacks(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    ended = serve(tmp_path, f"http://127.0.0.1:{hub.server_port}", "org/nope")
    problem = "org/nope is neither a directory nor a model of the hub"
    assert ended.stderr == f"outrider serve: {problem}\n"
