"""Prometheus scrapes a process's metrics, and a collector gets the pushed metrics."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.errors import OutriderError
from outrider.process.network.ports import free_port
from outrider.process.observability import metrics_export, telemetry
from outrider.process.observability.metrics_export import pushing_metrics, serve_metrics
from outrider.process.security.tls import Tls
from outrider.process.settings.config import ScrapedSettings
from tests.certificates import Site, trusting


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the newest metrics, keyed by service and name."""

    def __init__(self) -> None:
        self.received: dict[str, dict[str, Any]] = {}

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_metrics:
            name = next(
                a.value.string_value
                for a in resource.resource.attributes
                if a.key == "service.name"
            )
            self.received[name] = {
                metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics
            }
        return metrics_service_pb2.ExportMetricsServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = Collector()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("outrider:tokens", "Tokens.", ["drafter"], registry=registry).labels("ngram-1").inc(3)
    Gauge("outrider:running", "Running.", registry=registry).set(2)
    seconds = Histogram(
        "outrider:first_token_seconds", "TTFT.", ["model"], buckets=[0.1, 1.0], registry=registry
    )
    for value in (0.05, 0.5, 0.6, 7.0):
        seconds.labels("m").observe(value)
    return registry


def labels(point: Any) -> dict[str, str]:
    return {a.key: a.value.string_value for a in point.attributes}


def test_the_collector_gets_the_scraped_series_and_a_last_push(
    collector: tuple[Collector, str], registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, endpoint = collector
    later = Gauge("outrider:later", "Set when it is almost over.", registry=registry)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    with pushing_metrics(registry, "outrider-test"):
        deadline = time.monotonic() + 30
        while "outrider-test" not in servicer.received:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        later.set(1)
    received = servicer.received["outrider-test"]
    first_token = "outrider.first_token_seconds"
    assert set(received) == {
        "outrider.tokens_total",
        "outrider.running",
        "outrider.later",
        *(f"{first_token}_{part}" for part in ("bucket", "sum", "count")),
    }
    [tokens] = received["outrider.tokens_total"].sum.data_points
    assert tokens.as_double == 3
    assert received["outrider.tokens_total"].sum.is_monotonic
    assert labels(tokens) == {"drafter": "ngram-1"}
    assert received["outrider.later"].gauge.data_points[0].as_double == 1
    assert received["outrider.running"].gauge.data_points[0].as_double == 2
    buckets = received[f"{first_token}_bucket"].sum.data_points
    assert {labels(point)["le"]: point.as_double for point in buckets} == {
        "0.1": 1,
        "1.0": 3,
        "+Inf": 4,
    }
    [total] = received[f"{first_token}_sum"].sum.data_points
    assert (total.as_double, labels(total)) == (pytest.approx(8.15), {"model": "m"})


def test_a_silent_collector_delays_the_end_by_seconds_at_most(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        telemetry.setup("outrider-test")
        with pushing_metrics(registry, "outrider-test"):
            for _ in range(2000):
                telemetry.start_root("request", {}).end()
            started = time.monotonic()
        metrics_ended = time.monotonic()
        telemetry.shutdown()
    # Each shutdown takes 3 s, and does not wait until its whole queue is sent.
    assert metrics_ended - started < 12
    assert time.monotonic() - metrics_ended < 12


def test_metrics_are_served_and_the_error_names_a_port_in_use(
    registry: CollectorRegistry,
) -> None:
    port = free_port("127.0.0.1")
    serve_metrics(registry, ScrapedSettings(metrics_port=0))
    serve_metrics(registry, ScrapedSettings(metrics_port=port))
    # Prometheus has sent this header since 2.5. The header prefers OpenMetrics, whose names allow
    # no colon.
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    scraped = httpx.get(f"http://127.0.0.1:{port}/metrics", headers=accept).text
    assert 'outrider:tokens_total{drafter="ngram-1"} 3.0' in scraped
    with pytest.raises(
        OutriderError, match=f"--metrics-port: another process listens on 127.0.0.1:{port}"
    ):
        serve_metrics(registry, ScrapedSettings(metrics_port=port))


def scraper(port: int, tls: Tls, *, shows: bool = True) -> httpx.Client:
    """Return a client that trusts the authority, and shows a certificate if `shows`."""
    assert tls.ca is not None
    verify = trusting(tls.ca, tls if shows else None)
    return httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=verify)


def test_replaced_files_serve_the_next_scrape_and_still_ask_for_certificates(
    registry: CollectorRegistry, tmp_path: Path
) -> None:
    settings = ScrapedSettings(metrics_port=free_port("127.0.0.1"))
    old = Site(tmp_path / "served").issue("verifier")
    serve_metrics(registry, settings, old)
    with scraper(settings.metrics_port, old) as first:
        assert first.get("/metrics").status_code == 200
    former = scraper(settings.metrics_port, old)
    tls = Site(tmp_path / "served").issue("verifier")
    with scraper(settings.metrics_port, tls) as second:
        assert second.get("/metrics").status_code == 200
    for client in (former, scraper(settings.metrics_port, tls, shows=False)):
        # httpx does not convert an alert that comes after the client's handshake.
        with client, pytest.raises((httpx.TransportError, ssl.SSLError)):
            client.get("/metrics")


@pytest.mark.parametrize(
    ("sent", "encrypted"),
    [(b"", True), (b"GET /metrics HTTP/1.1\r\nX: ", False)],
    ids=["no handshake", "half a header"],
)
def test_silent_connections_hold_up_no_scrape_and_end(
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sent: bytes,
    encrypted: bool,
) -> None:
    monkeypatch.setattr(metrics_export, "_SILENT_S", 1.0)
    settings = ScrapedSettings(metrics_port=free_port("127.0.0.1"))
    tls, client = None, httpx.Client(base_url=f"http://127.0.0.1:{settings.metrics_port}")
    if encrypted:
        tls = Site(tmp_path).issue("verifier")
        client = scraper(settings.metrics_port, tls)
    serve_metrics(registry, settings, tls)
    address = ("127.0.0.1", settings.metrics_port)
    silent = [socket.create_connection(address, timeout=20) for _ in range(20)]
    for connection in silent:
        connection.sendall(sent)
    with client:
        assert "outrider:running 2.0" in client.get("/metrics").text
    for connection in silent:
        with connection, contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
