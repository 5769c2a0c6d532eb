"""The processes of the page under test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright

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


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Yield a browser, which is closed after the block."""
    found = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    path = next(filter(None, found), None)
    assert path is not None, "no Chromium on this machine; `make test` installs one"
    async with async_playwright() as playwright:
        # Chromium's sandbox needs user namespaces, which containers and root lack. The tests open
        # only our own pages.
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        await browser.close()


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
        """Stop a drafter properly, or kill it."""
        process = self.stack.drafters.pop(name)
        if kill:
            process.kill()
        else:
            process.stop()
        process.log.close()

    def stop(self) -> None:
        self.gateway.close()
        self.stack.stop()
