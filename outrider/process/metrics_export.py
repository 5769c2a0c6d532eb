"""Serves a process's Prometheus metrics over HTTP, and sends them by OTLP to a collector.

One registry is the source of both, so they cannot differ. In OTLP, `outrider:name` becomes
`outrider.name`, and metrics of OpenTelemetry's conventions for generative AI get the names there.
"""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from socketserver import ThreadingMixIn
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from outrider import __version__
from outrider.process.collector import collector_at
from outrider.process.config import ScrapedSettings, ServiceSettings
from outrider.process.roles import check_metrics, peer_of_ssl
from outrider.process.tls import Tls, http_context
from outrider.protocol.errors import OutriderError, Reason, invalid

log = logging.getLogger(__name__)

# Nothing here needs a further time series with the creation time of each counter.
disable_created_metrics()  # type: ignore[no-untyped-call]  # has no types

# The conventions have dots where Prometheus has underscores, and no unit at the end.
SEMANTIC_NAMES = {
    "gen_ai_server_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "gen_ai_server_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
    "gen_ai_server_request_duration_seconds": "gen_ai.server.request.duration",
}
SEMANTIC_LABELS = {
    "gen_ai_operation_name": "gen_ai.operation.name",
    "gen_ai_provider_name": "gen_ai.provider.name",
    "gen_ai_request_model": "gen_ai.request.model",
    "error_type": "error.type",
}
# Scrapes at once; each has its own connection and thread.
MAX_SCRAPES = 16
_SCRAPE_S = 10.0
# Key of a WSGI environment: the OutriderError that refuses the peer's certificate, or None.
_REFUSAL = "outrider.refusal"
_CUMULATIVE = export.AggregationTemporality.CUMULATIVE


def serve_metrics(
    registry: CollectorRegistry, settings: ScrapedSettings, tls: Tls | None = None
) -> None:
    """Serve /metrics in a thread of its own if the settings name a port.

    With TLS, only operators read them. Raises OutriderError(INVALID_VALUE) if the port cannot be
    bound or the files are bad.
    """
    if not settings.metrics_port:
        return
    host = settings.metrics_host
    port = settings.metrics_port

    def answer(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        """WSGI application: the metrics of the registry, for any request that is not refused."""
        refusal: OutriderError | None = environ[_REFUSAL]
        if refusal is not None:
            start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{refusal.message}\n".encode()]
        # Prometheus' own format, whatever the scraper accepts: in the OpenMetrics format the client
        # library turns the colon of `outrider:name` into an underscore.
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
        return [generate_latest(registry)]

    try:
        server = make_server(
            host, port, answer, server_class=_ThreadingServer, handler_class=_QuietHandler
        )
    except OSError as cause:
        raise invalid("metrics-port", f"cannot be bound: {host}:{port}: {cause}") from cause
    if tls is not None:
        server.context = http_context(tls)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    """Takes at most 16 connections at once, each in its own thread and for at most 10 s."""

    daemon_threads = True
    request_queue_size = 128
    context: ssl.SSLContext | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._open: dict[socket.socket, float] = {}
        super().__init__(*args, **kwargs)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. The handshake of TLS waits until the connection has a thread."""
        connection, address = super().get_request()
        if self.context is not None:
            connection = self.context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands with TLS, then answer."""
        if isinstance(request, ssl.SSLSocket):
            request.do_handshake()
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log why a connection failed, as by a certificate that is refused."""
        log.info("a scrape from %s failed: %s", client_address[0], sys.exception())

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for another connection."""
        return len(self._open) < MAX_SCRAPES

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a connection's thread, and note when."""
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Shut down old connections, so that their threads read the end and return.

        The server calls this twice a second.
        """
        for request, began in list(self._open.items()):
            if time.monotonic() - began > _SCRAPE_S:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)


class _QuietHandler(WSGIRequestHandler):
    def get_environ(self) -> dict[str, Any]:
        """The WSGI environment, with the reason if the peer's certificate is refused."""
        environ: dict[str, Any] = super().get_environ()
        environ[_REFUSAL] = _refusal(self.connection)
        return environ

    def log_message(self, format: str, *args: Any) -> None:
        """Log no scrapes."""


def _refusal(connection: socket.socket) -> OutriderError | None:
    """Why the peer may not read metrics by its certificate; None if it may, or without TLS."""
    if not isinstance(connection, ssl.SSLSocket):
        return None
    certificate = connection.getpeercert()
    if not certificate:
        message = "metrics require an operator's certificate, and the client has shown none"
        return OutriderError(Reason.CERTIFICATE_NOT_ALLOWED, message)
    try:
        check_metrics(peer_of_ssl(certificate))
    except OutriderError as error:
        return error
    return None


@contextmanager
def sending_metrics(
    registry: CollectorRegistry, service: str, settings: ServiceSettings
) -> Iterator[None]:
    """Send the registry by OTLP while the block runs, if the settings ask for it."""
    if not settings.otlp_endpoint or not settings.otlp_metrics_seconds:
        yield
        return
    sender = MetricsSender(registry, service, settings.otlp_endpoint, settings.otlp_metrics_seconds)
    try:
        yield
    finally:
        sender.stop()


class MetricsSender:
    """Sends all metrics of a registry every `interval_s` seconds, and once more at `stop`."""

    def __init__(
        self, registry: CollectorRegistry, service: str, endpoint: str, interval_s: float
    ) -> None:
        # Loaded only here, so that a process that sends no metrics starts faster.
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        self._registry = registry
        self._resource = Resource.create({"service.name": service, "service.version": __version__})
        self._exporter = OTLPMetricExporter(
            endpoint=endpoint, insecure=not endpoint.startswith("https")
        )
        self._collector = collector_at(endpoint)
        self._interval_s = interval_s
        self._started_ns = time.time_ns()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send the last metrics and hang up, after 3 s at most."""
        self._stopping.set()
        with self._collector.ending(self._exporter.shutdown):
            self._thread.join()
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._try_to_send()
        self._try_to_send()

    def _try_to_send(self) -> None:
        try:
            self._send()
        # Only this thread sends, and nobody would notice its end.
        except Exception:
            log.exception("metrics could not be converted for OTLP")

    def _send(self) -> None:
        metrics = [
            converted
            for family in self._registry.collect()
            if (converted := convert(family, self._started_ns))
        ]
        if not metrics:
            return
        scope = export.ScopeMetrics(InstrumentationScope("outrider", __version__), metrics, "")
        data = export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")])
        taken = self._exporter.export(data) is export.MetricExportResult.SUCCESS
        self._collector.record("metrics", taken=taken)


def convert(family: Metric, started_ns: int) -> export.Metric | None:
    """Convert a Prometheus metric to an OpenTelemetry one.

    `started_ns` is when the process began to count. Returns None for a metric without samples, and
    for types that Outrider does not use.
    """
    samples = family.samples
    unit = "s" if family.name.endswith("_seconds") else "1"
    name = SEMANTIC_NAMES.get(family.name, family.name.replace(":", "."))
    now_ns = time.time_ns()
    data: export.Sum | export.Gauge | export.Histogram
    if not samples:
        return None
    if family.type == "counter":
        points = list(_numbers(samples, started_ns, now_ns))
        data = export.Sum(points, _CUMULATIVE, is_monotonic=True)
    elif family.type == "gauge":
        data = export.Gauge(list(_numbers(samples, started_ns, now_ns)))
    elif family.type == "histogram":
        data = export.Histogram(list(_histograms(samples, started_ns, now_ns)), _CUMULATIVE)
    else:
        return None
    return export.Metric(name, family.documentation, unit, data)


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    named = {SEMANTIC_LABELS.get(name, name): value for name, value in labels.items()}
    named.pop("le", None)
    return named


def _numbers(
    samples: Iterable[Sample], started_ns: int, now_ns: int
) -> Iterator[export.NumberDataPoint]:
    for sample in samples:
        yield export.NumberDataPoint(_attributes(sample.labels), started_ns, now_ns, sample.value)


def _histograms(
    samples: Iterable[Sample], started_ns: int, now_ns: int
) -> Iterator[export.HistogramDataPoint]:
    """One point for each set of labels, with a count per bucket in place of cumulative ones."""
    groups: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in samples:
        attributes = tuple(_attributes(sample.labels).items())
        # A bucket's upper bound, else "sum" or "count".
        key = sample.labels.get("le") or sample.name.rpartition("_")[2]
        groups.setdefault(attributes, {})[key] = sample.value
    for attributes, values in groups.items():
        total = values.pop("sum")
        count = int(values.pop("count"))
        cumulative = [0, *(int(value) for value in values.values())]
        bounds = [float(bound) for bound in values if bound != "+Inf"]
        counts = [high - low for low, high in pairwise(cumulative)]
        # Prometheus keeps no minimum and maximum; None leaves them out of the message.
        unknown = cast(float, None)
        yield export.HistogramDataPoint(
            dict(attributes), started_ns, now_ns, count, total, counts, bounds, unknown, unknown
        )
