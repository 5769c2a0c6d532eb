"""A server and a file with a secret, which notice when anything reads them."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SECRET = "kestrel-4711"


@dataclass
class Traps:
    """The places with a secret, keyed by the URI that a reference would have."""

    places: list[str]
    read: list[str] = field(default_factory=list)
    """Every request to the server, and every time that this process opened the file."""


@contextmanager
def set_traps(folder: Path) -> Iterator[Traps]:
    """Serve the secret, and write it to a file of the folder, during the block."""
    path = folder / "secret.json"
    path.write_text(json.dumps({"password": SECRET}))
    found = Traps([])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.read.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"password": SECRET}).encode())

        do_POST = do_HEAD = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]) == str(path):
            found.read.append(str(path))

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found.places.append(f"http://127.0.0.1:{server.server_port}/secret")
        found.places += [f"{path.as_uri()}#/nope", str(path)]
        # The hook stays until the process ends, and finds nothing after the test.
        sys.addaudithook(hook)
        yield found
        server.shutdown()
