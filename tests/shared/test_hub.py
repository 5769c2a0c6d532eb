"""Models that are no directory: a small hub on this host, one that is gone, and none at all."""

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
READS = "from outrider.tokenizer import model_file; print(model_file('org/tiny', 'config.json').read_text())"


class Handler(BaseHTTPRequestHandler):
    """Has the files of the bundled target as those of org/tiny, and no other model."""

    def do_GET(self) -> None:
        """A file, with what the hub says of it."""
        name = self.path.rpartition("/")[2]
        if self.path == "/":
            self._answer(200, b"", {})
        elif "org/tiny" in self.path:
            content = (TARGET / name).read_bytes()
            self._answer(200, content, {"ETag": f'"{name}"', "X-Repo-Commit": "0" * 40})
        else:
            self._answer(
                404,
                b"",
                {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"},
            )

    do_HEAD = do_GET

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(home: Path, endpoint: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with an empty cache, as on a machine that has never asked the hub."""
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
    return run(home, endpoint, "-m", "outrider.launch.cli", "serve", target, *ports)


def test_a_hub_id_is_read_from_the_hub_and_from_the_cache_once_the_hub_is_gone(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    first = run(tmp_path, endpoint, "-c", READS)
    assert first.stdout.strip() == (TARGET / "config.json").read_text().strip(), first.stderr
    hub.shutdown()
    hub.server_close()
    again = run(tmp_path, endpoint, "-c", READS)
    assert again.stdout == first.stdout
    assert again.stderr == ""


@pytest.mark.parametrize("target", ["nope", "org/nope"])
def test_a_missing_model_fails_at_once_in_one_line_when_there_is_no_hub(
    tmp_path: Path, target: str
) -> None:
    ended = serve(tmp_path, "http://127.0.0.1:1", target)
    problem = f"there is no directory {target}, and the hub cannot be reached"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"outrider serve: {problem}\n")


def test_a_path_that_can_be_no_hub_id_is_a_missing_directory(tmp_path: Path) -> None:
    ended = serve(tmp_path, "http://127.0.0.1:1", "./models/targt")
    assert ended.stderr == "outrider serve: there is no directory ./models/targt\n"


def test_a_model_that_the_hub_lacks_is_refused_by_name(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    ended = serve(tmp_path, f"http://127.0.0.1:{hub.server_port}", "org/nope")
    assert (
        ended.stderr == "outrider serve: org/nope is neither a directory nor a model of the hub\n"
    )


def test_a_directory_without_a_model_is_refused_by_the_file_it_lacks(tmp_path: Path) -> None:
    ended = serve(tmp_path, "http://127.0.0.1:1", "docs")
    assert ended.stderr == "outrider serve: docs has no config.json\n"
