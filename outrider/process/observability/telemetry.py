"""OpenTelemetry traces, which cost nothing while they are off, and logs that name their trace.

A trace context travels as a W3C `traceparent` string: in the gRPC metadata of a call for one
request, and in the messages of a call that many sequences share. The empty string means "not
sampled"; every span under it is the same no-op span.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, NoReturn

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from outrider import __version__
from outrider.errors import OutriderError
from outrider.process.runtime import exit_now

# OpenTelemetry's own variables, which collectors document. So no setting of ours repeats them.
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

LAST_SEND_S = 3.0
"""The seconds that each export to a collector may take, a process's last export included."""

LogFormat = Literal["text", "json"]
Attribute = str | int | float | bool | Sequence[str]
Kind = trace.SpanKind
_propagator = TraceContextTextMapPropagator()
_tracer: trace.Tracer | None = None
_provider: TracerProvider | None = None
# Records of the current task are logged with this traceparent.
_logged: ContextVar[str] = ContextVar("traceparent", default="")
# The id of the request that the current task serves.
_request_id: ContextVar[str] = ContextVar("request_id", default="")
# A log line shows a value of this form as it is, and quotes any other value.
_PLAIN = re.compile(r"[!#-<>-~]+")


class Span:
    """A span, or a no-op if tracing is off or the trace is not sampled.

    As a context manager it ends with the block, and log records of the block carry its ids.
    """

    __slots__ = ("_before", "_span", "traceparent")

    def __init__(self, span: trace.Span | None) -> None:
        self._span = span
        self._before = ""
        self.traceparent = ""
        if span is not None:
            carrier: dict[str, str] = {}
            _propagator.inject(carrier, trace.set_span_in_context(span))
            self.traceparent = carrier.get("traceparent", "")

    def set(self, **attributes: Attribute) -> None:
        """Set attributes; a dot in a name is written as a double underscore: `outrider__epoch`."""
        if self._span is not None:
            for name, value in attributes.items():
                self._span.set_attribute(name.replace("__", "."), value)

    def ended_by(self, error: BaseException) -> None:
        """Record the error that ended the work: `error.type` is its reason or exception class.

        Only faults of the server set the status to ERROR. By OpenTelemetry's conventions for
        servers, the status stays unset for the caller's faults (4xx). Cancellation, by a caller
        that went away, is not recorded.
        """
        if self._span is None or isinstance(error, (GeneratorExit, asyncio.CancelledError)):
            return
        if isinstance(error, OutriderError):
            kind = error.reason.name.lower()
            message = error.message
            is_servers_fault = error.reason.kind.http >= 500
        else:
            kind = type(error).__name__
            message = f"{kind}: {error}"
            is_servers_fault = True
        self.set(error__type=kind)
        if is_servers_fault:
            self._span.set_status(trace.StatusCode.ERROR, message)

    def end(self) -> None:
        """End the span now."""
        if self._span is not None:
            self._span.end()

    def __enter__(self) -> Span:
        if self._span is not None:
            self._before = _logged.get()
            _logged.set(self.traceparent)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace_back: TracebackType | None,
    ) -> None:
        if value is not None:
            self.ended_by(value)
        if self._span is not None:
            _logged.set(self._before)
        self.end()


NO_SPAN = Span(None)


def enabled() -> bool:
    """Return whether tracing is on, that is, whether this process exports spans."""
    return _tracer is not None


def setup(service: str, processor: SpanProcessor | None = None, *, instance: str = "") -> None:
    """Turn tracing on if spans have a destination.

    The destination is the OTLP endpoint of OpenTelemetry's environment variables, or a `processor`
    in tests. The SDK reads the sampler from the environment too.
    """
    global _tracer, _provider
    if processor is None and not any(os.environ.get(name) for name in _ENDPOINTS):
        return
    if processor is None:
        # This import is not at the top, so that a process without tracing starts faster.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        processor = BatchSpanProcessor(OTLPSpanExporter(timeout=LAST_SEND_S))
    _provider = TracerProvider(resource=resource(service, instance), shutdown_on_exit=False)
    _provider.add_span_processor(processor)
    _tracer = _provider.get_tracer("outrider")


def resource(service: str, instance: str = "") -> Resource:
    """Return OpenTelemetry's attributes of this process.

    `instance` distinguishes processes of one service.
    """
    named = {"service.name": service, "service.version": __version__}
    if instance and "service.instance.id" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        named["service.instance.id"] = instance
    return Resource.create(named)


def shutdown() -> None:
    """Send the last spans, for 3 s at most, and turn tracing off."""
    global _tracer, _provider
    if _provider is not None:
        # The SDK would wait 30 s for a collector that is silent.
        ending = threading.Thread(target=_provider.shutdown, daemon=True)
        ending.start()
        ending.join(LAST_SEND_S)
    _tracer = _provider = None


def send_spans_and_exit() -> NoReturn:
    """Send the remaining spans and end the process with status 0, without teardown."""
    shutdown()
    exit_now()


def start_root(name: str, headers: Mapping[str, str], **attributes: Attribute) -> Span:
    """Start a server's span: in the trace of the `traceparent` header, or else in a new trace."""
    if _tracer is None:
        return NO_SPAN
    carrier = {key.lower(): value for key, value in headers.items()}
    return _start(_tracer, name, carrier, attributes, kind=Kind.SERVER)


def start(
    name: str,
    traceparent: str,
    *,
    seconds_ago: float = 0.0,
    links: Iterable[str] = (),
    kind: Kind = Kind.INTERNAL,
    **attributes: Attribute,
) -> Span:
    """Start a child of `traceparent` that began `seconds_ago`.

    `links` are traceparents of related spans that are not its parent. Returns the no-op span if
    `traceparent` is empty or tracing is off.
    """
    if _tracer is None or not traceparent:
        return NO_SPAN
    linked = [trace.Link(_context(other)) for other in links if other]
    carrier = {"traceparent": traceparent}
    return _start(_tracer, name, carrier, attributes, seconds_ago, linked, kind)


def _context(traceparent: str) -> trace.SpanContext:
    context = _propagator.extract({"traceparent": traceparent})
    return trace.get_current_span(context).get_span_context()


def _start(
    tracer: trace.Tracer,
    name: str,
    carrier: Mapping[str, str],
    attributes: Mapping[str, Attribute],
    seconds_ago: float = 0.0,
    links: Sequence[trace.Link] = (),
    kind: Kind = Kind.INTERNAL,
) -> Span:
    began_ns = time.time_ns() - int(seconds_ago * 1e9)
    span = tracer.start_span(
        name, context=_propagator.extract(carrier), kind=kind, links=links, start_time=began_ns
    )
    if not span.is_recording():
        return NO_SPAN
    result = Span(span)
    result.set(**attributes)
    return result


def log_request_id(request_id: str) -> None:
    """Name a request in the log records of the current task and of the tasks that it starts."""
    _request_id.set(request_id)


def setup_logging(level: str, log_format: LogFormat = "text") -> None:
    """Log to stderr, one line per record, or one JSON object per record."""
    # The exporter warns of each failed attempt, and logs an error when the export has failed. So
    # the warnings are left out.
    logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.ERROR)
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if log_format == "json"
        else TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level == "info":
        # The process logs its own start and stop, which uvicorn would log once more.
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


def announce(text: str) -> None:
    """Print `text`, which says that the process serves, on standard output at any log level.

    If the log has JSON records, the text is printed in a JSON record.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            record = logging.LogRecord("outrider", logging.INFO, "", 0, text, None, None)
            text = handler.formatter.format(record)
    print(text, flush=True)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the record's fields (`extra={"fields": ...}`) and the ids of its request and span.

    On a thread that entered no span, such as the engine's, `extra={"traceparent": ...}` names the
    span.
    """
    fields: dict[str, object] = dict(getattr(record, "fields", {}))
    if request_id := _request_id.get():
        fields.setdefault("request_id", request_id)
    if traceparent := getattr(record, "traceparent", "") or _logged.get():
        _, fields["trace_id"], fields["span_id"], _ = traceparent.split("-")
    return fields


class TextFormatter(logging.Formatter):
    """Appends a record's fields to its first line, as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record."""
        line = super().format(record)
        first, *rest = line.split("\n", 1)
        shown = [f"{name}={_shown(value)}" for name, value in _fields(record).items()]
        return "\n".join([" ".join([first, *shown]), *rest])


def _shown(value: object) -> str:
    """Return the value, quoted if it is empty or has blanks, `"`, `=` or non-ASCII characters."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object in one line, with its fields beside its message."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record."""
        shown = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, default=str)
