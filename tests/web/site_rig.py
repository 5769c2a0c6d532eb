"""The processes of the page under test."""

from __future__ import annotations

import os
import subprocess
import sys

from outrider.process.network.ports import free_port
from tests.stack import ROOT, GatewayProcess, Stack

EXAMPLE = ROOT / "clients/browser"


def npm(*arguments: str) -> None:
    """Run npm for the example page."""
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        ["npm", *arguments], cwd=EXAMPLE, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Site:
    """A verifier, an n-gram drafter and a gateway. Tests add and remove more drafters."""

    def __init__(self, *verifier_flags: str) -> None:
        metrics_port = free_port()
        self.verifier_metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        self.stack = Stack("--metrics-port", str(metrics_port), *verifier_flags)
        self.stack.add_drafter("ngram-1", "ngram")
        origins = ("--allowed-origins", "http://127.0.0.1:*")
        self.gateway = GatewayProcess(self.stack.address, flags=origins)
        self.url = self.gateway.url
        self.stack.wait_ready()

    def remove_drafter(self, name: str, *, kill: bool = False) -> None:
        """Stop a drafter in order, or kill it."""
        process = self.stack.drafters.pop(name)
        if kill:
            process.kill()
        else:
            process.stop()
        process.log.close()

    def stop(self) -> None:
        self.gateway.close()
        self.stack.stop()
