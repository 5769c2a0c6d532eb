"""A missing collector and its return are logged once each, and do not delay the exit."""

import logging
import socket
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from prometheus_client import CollectorRegistry, Counter

from outrider.process import telemetry
from outrider.process.config import ScrapedSettings
from outrider.process.metrics_export import sending_metrics
from outrider.process.ports import free_port


class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Accepts all metrics."""

    def Export(self, request: Any, context: Any) -> Any:
        return metrics_service_pb2.ExportMetricsServiceResponse()


class Spans(trace_service_pb2_grpc.TraceServiceServicer):
    """Accepts all spans."""

    def Export(self, request: Any, context: Any) -> Any:
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collector(port: int) -> Iterator[None]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Spans(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()


@contextmanager
def sending(port: int) -> Iterator[None]:
    """Send metrics 20 times a second; spans are exported as often."""
    registry = CollectorRegistry()
    Counter("outrider:tokens", "Tokens.", registry=registry)
    settings = ScrapedSettings(otlp_endpoint=f"http://127.0.0.1:{port}", otlp_metrics_seconds=0.05)
    telemetry.setup("outrider-test", endpoint=settings.otlp_endpoint)
    try:
        with sending_metrics(registry, "outrider-test", settings):
            yield
    finally:
        telemetry.shutdown()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the SDK's environment variables to one attempt, and spans every 50 ms."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        with telemetry.start_root("request", {}):
            time.sleep(0.02)


def test_each_loss_and_return_of_a_collector_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    port = free_port("127.0.0.1")
    attempts: list[object] = []
    with sending(port):
        until(lambda: "takes no" in caplog.text)
        until(lambda: bool(attempts.append(None)) or len(attempts) > 100)
        with collector(port):
            until(lambda: "again" in caplog.text)
        until(lambda: caplog.text.count("takes no") == 2)
    messages = [
        record.getMessage().partition(f"http://127.0.0.1:{port} ")[2] for record in caplog.records
    ]
    assert [text.split()[1] for text in messages] == ["no", "spans", "no"]


@pytest.mark.parametrize("listens", [False, True])
def test_a_silent_collector_does_not_delay_the_exit(
    listens: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        with sending(silent.getsockname()[1]):
            until(lambda: "takes no" in caplog.text)
            started = time.monotonic()
        assert time.monotonic() - started < 2
