"""The conformance kit's verifier demands mutual TLS, and compares ids with certificates."""

from __future__ import annotations

import asyncio
import sys

import pytest

from outrider.conformance.kit import Kit
from outrider.conformance.rules import Outcome
from tests.certificates import Site
from tests.tls.sites import FINGERPRINT
from tests.tls.test_verifier_port import outcome, stream_drafts


@pytest.mark.slow
def test_a_drafter_with_a_certificate_passes(site: Site) -> None:
    mine = site.issue("drafter")
    command = [sys.executable, "-m", "drafter_svc", "--family", "ngram", "--verifier", "{address}"]
    command += ["--tls-cert", str(mine.cert), "--tls-key", str(mine.key), "--tls-ca", str(site.ca)]
    kit = Kit(command, FINGERPRINT, 4096, site.issue("verifier"))
    asyncio.run(kit.run())
    assert [(name, kit.results[name].reason) for name in kit.failed] == []


@pytest.mark.parametrize(("name", "kept"), [("drafter/1", True), ("other", False)])
async def test_an_id_of_another_certificate_breaks_hello(site: Site, name: str, kept: bool) -> None:
    kit = Kit([], FINGERPRINT, 4096)
    await kit.verifier.start(tls=site.issue("verifier"))
    address = f"127.0.0.1:{kit.verifier.port}"
    assert await outcome(address, site.issue("drafter"), stream_drafts(name)) is None
    await kit.verifier.stop()
    assert (kit.results["hello"].outcome is not Outcome.FAIL) is kept
    assert kept or kit.results["hello"].reason.startswith(f"drafter_id is '{name}', but")
