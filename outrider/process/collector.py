"""Whether the OTLP collector takes what this process sends: says once that it is away, and once that it is back."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

_LAST_SEND_S = 3.0


class Collector:
    """One collector. Spans and metrics are sent to it by threads of their own."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        # The exporters log each attempt; what becomes of them is said here.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)

    def heard(self, signal: str, *, taken: bool) -> None:
        """Whether the collector took the last `signal`, "spans" or "metrics", after all attempts."""
        with self._lock:
            was_away = bool(self._failing)
            (self._failing.discard if taken else self._failing.add)(signal)
            away = bool(self._failing)
        if away and not was_away:
            log.warning(
                "the collector at %s takes no %s; until it does, spans are lost, and metrics go on",
                self._endpoint,
                signal,
            )
        elif was_away and not away:
            log.info("the collector at %s takes spans and metrics again", self._endpoint)

    @contextmanager
    def ending(self, hang_up: Callable[[], None]) -> Iterator[None]:
        """While the block sends what is left: `hang_up` after some seconds, or at once if the collector is away."""
        timer = threading.Timer(0.0 if self._failing else _LAST_SEND_S, hang_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@functools.cache
def collector_at(endpoint: str) -> Collector:
    """The one collector of this process at an endpoint."""
    return Collector(endpoint)


class WatchedSpans(SpanExporter):
    """Exports spans as another exporter does, and tells the collector's state by what becomes of them."""

    def __init__(self, exporter: SpanExporter, collector: Collector) -> None:
        self._exporter = exporter
        self._collector = collector

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        self._collector.heard("spans", taken=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
