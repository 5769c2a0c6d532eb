"""Logs once that the OTLP collector takes nothing, and once that it is back."""

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
    """The state of one collector, to which separate threads send spans and metrics."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._failing: set[str] = set()
        # The exporters log every attempt; this class logs only changes.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)

    def record(self, signal: str, *, taken: bool) -> None:
        """Record whether the collector took the last "spans" or "metrics", after all attempts."""
        with self._lock:
            was_away = bool(self._failing)
            if taken:
                self._failing.discard(signal)
            else:
                self._failing.add(signal)
            away = bool(self._failing)
        if away and not was_away:
            log.warning(
                "the collector at %s takes no %s; until it does, spans are lost; metrics are not",
                self._endpoint,
                signal,
            )
        elif was_away and not away:
            log.info("the collector at %s takes spans and metrics again", self._endpoint)

    @contextmanager
    def ending(self, hang_up: Callable[[], None]) -> Iterator[None]:
        """While the block sends the last data, call `hang_up` after 3 s.

        If the last attempt failed, call it at once.
        """
        timer = threading.Timer(0.0 if self._failing else _LAST_SEND_S, hang_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@functools.cache
def collector_at(endpoint: str) -> Collector:
    """The process's collector at an endpoint; each call returns the same object."""
    return Collector(endpoint)


class WatchedSpans(SpanExporter):
    """Exports spans with another exporter, and reports each outcome to the collector's state."""

    def __init__(self, exporter: SpanExporter, collector: Collector) -> None:
        self._exporter = exporter
        self._collector = collector

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send the spans and record the outcome."""
        result = self._exporter.export(spans)
        self._collector.record("spans", taken=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        """Close the other exporter."""
        self._exporter.shutdown()
