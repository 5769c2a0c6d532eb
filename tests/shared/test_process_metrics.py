"""Every process says whether it is ready, what it is, and when its certificates expire."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cryptography import x509
from prometheus_client import CollectorRegistry

from outrider import __version__
from outrider.process.network import rpc
from outrider.process.observability.process_metrics import add_process_metrics
from tests.certificates import Site

EXPIRY = "outrider:certificate_expiry_timestamp_seconds"


def test_a_process_has_its_build_and_its_resources() -> None:
    registry = CollectorRegistry()
    add_process_metrics(registry, lambda: True, {"tls": None})
    assert registry.get_sample_value("outrider:build_info", {"version": __version__}) == 1
    assert registry.get_sample_value("process_resident_memory_bytes") is not None
    assert registry.get_sample_value("process_start_time_seconds") is not None
    assert registry.get_sample_value(EXPIRY, {"setting": "tls-cert"}) is None


@pytest.mark.asyncio
async def test_a_process_is_ready_as_long_as_its_health_says_so() -> None:
    registry = CollectorRegistry()
    server = rpc.Server("outrider.v1.Any")
    add_process_metrics(registry, lambda: server.is_serving, {})
    seen = []
    await server.start("127.0.0.1:0")
    for serving in (False, True, False, True):
        await server.set_serving(serving)
        seen.append(registry.get_sample_value("outrider:ready"))
    await server.stop(0)
    seen.append(registry.get_sample_value("outrider:ready"))
    assert seen == [0, 1, 0, 1, 0]


def test_the_expiry_is_that_of_the_certificate_in_the_file_now(tmp_path: Path) -> None:
    site = Site(tmp_path)
    tls = site.issue("gateway")
    registry = CollectorRegistry()
    add_process_metrics(registry, lambda: True, {"tls": tls})
    for hours in (1, 200):
        site.issue("gateway", hours=hours)
        end = x509.load_pem_x509_certificate(tls.cert.read_bytes()).not_valid_after_utc
        found = registry.get_sample_value(EXPIRY, {"setting": "tls-cert"})
        assert found == end.timestamp()
    tls.cert.write_text("no certificate")
    found = registry.get_sample_value(EXPIRY, {"setting": "tls-cert"})
    assert found is not None
    assert math.isnan(found)
