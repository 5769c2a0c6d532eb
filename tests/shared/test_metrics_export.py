"""A collector gets the same metrics that Prometheus scrapes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary

from outrider.process import metrics_export
from outrider.process.config import ScrapedSettings
from outrider.process.metrics_export import MAX_SCRAPES, sending_metrics, serve_metrics
from outrider.process.ports import free_port
from outrider.protocol.errors import OutriderError


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the newest metrics, by service and name."""

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
        "gen_ai_server_time_to_first_token_seconds",
        "TTFT.",
        ["gen_ai_request_model"],
        buckets=[0.1, 1.0],
        registry=registry,
    )
    for value in (0.05, 0.5, 0.6, 7.0):
        seconds.labels("m").observe(value)
    Counter("outrider:never", "Without a sample.", ["drafter"], registry=registry)
    Summary("outrider:strange", "Of a kind that is not used.", registry=registry)
    return registry


def test_the_collector_gets_the_scraped_metrics_and_a_last_export(
    collector: tuple[Collector, str], registry: CollectorRegistry
) -> None:
    servicer, endpoint = collector
    settings = ScrapedSettings(otlp_endpoint=endpoint, otlp_metrics_seconds=0.05)
    with sending_metrics(registry, "outrider-test", settings):
        deadline = time.monotonic() + 30
        while "outrider-test" not in servicer.received:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        Gauge("outrider:late", "Set when it is almost over.", registry=registry).set(1)
    received = servicer.received["outrider-test"]
    assert set(received) == {
        "outrider.tokens",
        "outrider.running",
        "gen_ai.server.time_to_first_token",
        "outrider.late",
    }
    [tokens] = received["outrider.tokens"].sum.data_points
    assert tokens.as_double == 3
    assert received["outrider.tokens"].sum.is_monotonic
    assert [(a.key, a.value.string_value) for a in tokens.attributes] == [("drafter", "ngram-1")]
    assert received["outrider.running"].gauge.data_points[0].as_double == 2
    first_token = received["gen_ai.server.time_to_first_token"]
    assert first_token.unit == "s"
    [point] = first_token.histogram.data_points
    assert (point.count, point.sum) == (4, pytest.approx(8.15))
    assert (list(point.explicit_bounds), list(point.bucket_counts)) == ([0.1, 1.0], [1, 2, 1])
    assert [a.key for a in point.attributes] == ["gen_ai.request.model"]


def test_a_missing_collector_delays_nothing(registry: CollectorRegistry) -> None:
    settings = ScrapedSettings(
        otlp_endpoint=f"http://127.0.0.1:{free_port('127.0.0.1')}", otlp_metrics_seconds=0.05
    )
    started = time.monotonic()
    with sending_metrics(registry, "outrider-test", settings):
        time.sleep(0.2)
    assert time.monotonic() - started < 5


def test_metrics_are_served_and_the_error_names_a_port_in_use(
    registry: CollectorRegistry,
) -> None:
    port = free_port("127.0.0.1")
    serve_metrics(registry, ScrapedSettings(metrics_port=0))
    serve_metrics(registry, ScrapedSettings(metrics_port=port))
    # Prometheus sends this since 2.5. It prefers OpenMetrics, whose names allow no colon.
    accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
    scraped = httpx.get(f"http://127.0.0.1:{port}/metrics", headers=accept).text
    assert 'outrider:tokens_total{drafter="ngram-1"} 3.0' in scraped
    with pytest.raises(OutriderError, match=f"metrics-port cannot be bound: 127.0.0.1:{port}"):
        serve_metrics(registry, ScrapedSettings(metrics_port=port))


@pytest.mark.parametrize(
    "sent", [b"", b"GET /metrics HTTP/1.1\r\nX: "], ids=["nothing", "half a header"]
)
def test_idle_connections_are_few_and_short(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(metrics_export, "_SCRAPE_S", 0.5)
    settings = ScrapedSettings(metrics_port=free_port("127.0.0.1"))
    serve_metrics(registry, settings)
    before = threading.active_count()
    idle = [
        socket.create_connection(("127.0.0.1", settings.metrics_port), timeout=20)
        for _ in range(4 * MAX_SCRAPES)
    ]
    for connection in idle:
        # The server has already closed the connections beyond its limit.
        with contextlib.suppress(OSError):
            connection.sendall(sent)
    assert threading.active_count() <= before + MAX_SCRAPES
    for connection in idle:
        with connection, contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
    answer = httpx.get(f"http://127.0.0.1:{settings.metrics_port}/metrics")
    assert "outrider:running 2.0" in answer.text
