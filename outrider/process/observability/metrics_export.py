"""Lets Prometheus scrape metrics, and pushes the metrics of drafters that it cannot reach.

Scrapes and pushes read the same registry. Over OTLP, the name of each series has a dot in place of
the colon: `outrider.name` for `outrider:name`.
"""

from __future__ import annotations

import logging
import os
import ssl
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from opentelemetry.metrics import CallbackOptions, Observation
from prometheus_client import (
    CollectorRegistry,
    disable_created_metrics,
    make_wsgi_app,
    start_http_server,
)

from outrider.process.network.ports import refused
from outrider.process.observability.telemetry import LAST_SEND_S, resource
from outrider.process.security.exposure import host_of
from outrider.process.security.tls import Tls, http_context
from outrider.process.settings.config import ScrapedSettings

log = logging.getLogger(__name__)

# Without this call, each counter would have a further time series with the time when the counter
# was created. Nobody needs such series.
disable_created_metrics()  # type: ignore[no-untyped-call]  # has no types

# The library gives each connection a thread. A silent connection must not hold a thread for ever.
_SILENT_S = 10.0
# Maps a metric's type to the ends of its series' names in Prometheus. Outrider has no other types.
_SERIES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def serve_metrics(
    registry: CollectorRegistry, settings: ScrapedSettings, tls: Tls | None = None
) -> None:
    """Serve /metrics in a thread of its own if the settings name a port.

    With TLS, scrapers need a certificate, of any role, signed by an authority of `tls.ca`.
    Raises OutriderError(INVALID_VALUE) if the port cannot be bound or the files are bad.
    """
    if not settings.metrics_port:
        return
    host, port = host_of(settings.listen), settings.metrics_port
    files: dict[str, Any] = {}
    if tls is not None:
        files = {"certfile": str(tls.cert), "keyfile": str(tls.key), "client_cafile": str(tls.ca)}
    try:
        # Types of the standard library lack some attributes that are set below.
        server: Any
        server, _ = start_http_server(
            port, host, registry, client_auth_required=tls is not None, **files
        )
    except OSError as cause:
        raise refused("metrics-port", host, port, cause) from cause
    server.RequestHandlerClass.timeout = _SILENT_S
    server.handle_error = _log_failure
    server.set_app(partial(_in_prometheus_format, make_wsgi_app(registry)))
    if tls is not None:
        # Take changed files with each handshake, and resume no session of an expired certificate.
        server.socket.context.sni_callback = http_context(tls).sni_callback
        server.socket.context.options |= ssl.OP_NO_TICKET
        server.socket.context.num_tickets = 0
        # Shake hands in the connection's thread. In the thread that accepts connections, a silent
        # connection would block all scrapes.
        server.socket.do_handshake_on_connect = False


def _in_prometheus_format(
    app: Callable[..., Iterable[bytes]], environ: dict[str, Any], start_response: Any
) -> Iterable[bytes]:
    """Answer in Prometheus' own format, whatever the scraper accepts.

    In the OpenMetrics format the library turns the colon of `outrider:name` into an underscore.
    """
    environ.pop("HTTP_ACCEPT", None)
    return app(environ, start_response)


def _log_failure(request: Any, client_address: Any) -> None:
    """Log why a connection failed, such as a certificate that is refused."""
    log.info("a scrape from %s failed: %s", client_address[0], sys.exception())


@contextmanager
def pushing_metrics(
    registry: CollectorRegistry, service: str, instance: str = ""
) -> Iterator[None]:
    """Push the registry over OTLP repeatedly, and at the end of the block.

    Metrics are pushed only if OTEL_METRICS_EXPORTER is otlp. OpenTelemetry's other environment
    variables set the interval and the endpoint. Only metrics that the registry has when the block
    begins are pushed. The last push takes 3 s at most.
    """
    if os.environ.get("OTEL_METRICS_EXPORTER") != "otlp":
        yield
        return
    # This import is not at the top, so that a process that pushes no metrics starts faster.
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = PeriodicExportingMetricReader(OTLPMetricExporter(timeout=LAST_SEND_S))
    provider = MeterProvider([reader], resource(service, instance), shutdown_on_exit=False)
    meter = provider.get_meter("outrider")
    # OpenTelemetry cannot observe a histogram that another library has counted. So the histogram's
    # series are pushed under Prometheus' names. They are up-down counters, because plain counters
    # would get "_total" after these names.
    create: dict[str, Callable[..., Any]] = {
        "counter": meter.create_observable_counter,
        "gauge": meter.create_observable_gauge,
        "histogram": meter.create_observable_up_down_counter,
    }
    for family in registry.collect():
        for suffix in _SERIES[family.type]:
            series = f"{family.name}{suffix}"
            read = partial(_observe, registry, series)
            create[family.type](series.replace(":", "."), [read], description=family.documentation)
    try:
        yield
    finally:
        provider.shutdown(1000 * LAST_SEND_S)


def _observe(
    registry: CollectorRegistry, series: str, options: CallbackOptions
) -> Iterator[Observation]:
    """Yield the present values of one series, one for each set of labels."""
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == series:
                yield Observation(sample.value, sample.labels)
