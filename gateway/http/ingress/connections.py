"""Bounds HTTP connections: the size and number of headers, and the time that a client may take."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from gateway import access_log
from gateway.access.gate import PEER_KEY
from gateway.access_log import Access, AccessLog
from gateway.api_errors import body_for
from gateway.config import GatewaySettings
from outrider.errors import OutriderError, Reason
from outrider.process.security.roles import Peer, check_http, peer_of_ssl

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 128
MAX_IDLE = 1024
"""The maximum number of connections of a gateway that stay open between two requests."""
UNSENT_BYTES = 16 * 1024
"""A connection counts as full once the gateway holds this many unsent bytes for it. The kernel
takes about as many bytes before that.
"""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on headers and on the time in which bytes must arrive."""

    # The next two limits keep a slow sender from holding a connection. An honest sender is done far
    # earlier.
    header_seconds = 10.0
    body_seconds = 60.0
    # The next limit keeps a client from holding an unread answer for ever. A slow reader's answer
    # ends earlier, but its last chunks and its error may wait in the connection.
    unread_seconds = 120.0
    needs_certificate: bool
    log_access: AccessLog
    idle: dict[BoundedProtocol, None]
    """The gateway's idle connections, the longest idle first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The parser may refuse bytes before uvicorn sets the URL.
        self.url = b""
        self._refusal: OutriderError | None = None
        self._peer: Peer | None = None
        # The number of bytes of the request line and of complete headers.
        self._header_bytes = 0
        # The number of bytes since the last byte of a body. These bytes may be an unfinished header
        # or trailer, which the parser has not reported yet.
        self._pending_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    # uvicorn's own override has the same narrower type.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's type
        """Allow `header_seconds` for the first request's headers to arrive."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(UNSENT_BYTES)
        self._refusal = self._refuse_certificate(transport)
        self._expect(self.header_seconds)

    def _refuse_certificate(self, transport: asyncio.Transport) -> OutriderError | None:
        """Return why the client's certificate does not allow HTTP.

        Return None if it does, or without TLS.
        """
        connection = transport.get_extra_info("ssl_object")
        if connection is None:
            return None
        certificate = connection.getpeercert()
        if self.needs_certificate and not certificate:
            message = "this gateway requires a client certificate, and the client has shown none"
            return OutriderError(Reason.CERTIFICATE_NOT_ALLOWED, message)
        try:
            self._peer = peer_of_ssl(certificate)
            check_http(self._peer)
        except OutriderError as error:
            return error
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the deadlines of the connection."""
        self.idle.pop(self, None)
        self._expect(None)
        self._stop_waiting()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Allow the client `unread_seconds` to read most of the bytes that wait."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Remove the deadline, since the client has read."""
        super().resume_writing()
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        """Parse the bytes; refuse a header or trailer that grows beyond MAX_HEADER_BYTES."""
        self.idle.pop(self, None)
        self._pending_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._pending_bytes > MAX_HEADER_BYTES:
            self._refuse(_too_large())
        elif self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            # The received bytes begin another request, or are noise. Either way time is limited.
            self._expect(self.header_seconds)

    def on_message_begin(self) -> None:
        """Count the header bytes of this request from 0, and tell the application the peer."""
        self._header_bytes = 0
        super().on_message_begin()
        # ASGI lets a server add keys of its own, which uvicorn's type does not know.
        cast(dict[str, Any], self.scope)[PEER_KEY] = self._peer

    def on_url(self, url: bytes) -> None:
        """Count the request line as header bytes.

        Raises OutriderError(CERTIFICATE_NOT_ALLOWED) if the client's certificate does not allow
        HTTP.
        """
        if self._refusal is not None:
            # The exception stops the parser, and uvicorn then calls `send_400_response`.
            raise self._refusal
        self._header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header.

        Raises OutriderError(HEADERS_TOO_LARGE) beyond MAX_HEADERS or MAX_HEADER_BYTES.
        """
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES or len(self.headers) >= MAX_HEADERS:
            # The exception stops the parser, and uvicorn then calls `send_400_response`.
            self._refusal = _too_large()
            raise self._refusal
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Allow `body_seconds` for the body to arrive."""
        self._expect(self.body_seconds)
        self.transport.set_write_buffer_limits(UNSENT_BYTES)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Collect a part of the body. Its bytes do not count as header bytes."""
        self._pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Remove the deadline: the request has arrived."""
        self._pending_bytes = 0
        self._expect(None)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser refused. The error has the shape of the path's API."""
        malformed = OutriderError(Reason.MALFORMED_REQUEST, f"this is not HTTP/1.1: {msg}")
        self._refuse(self._refusal or malformed)

    def on_response_complete(self) -> None:
        """Allow the client `unread_seconds` to read the end of the answer.

        The connection is idle now, unless its next request has come. If too many connections are
        idle, the longest idle connection is closed.
        """
        super().on_response_complete()
        self._expect_reading()
        if self.timeout_keep_alive_task is not None:
            self.idle[self] = None
            if len(self.idle) > MAX_IDLE:
                longest = next(iter(self.idle))
                del self.idle[longest]
                longest.transport.close()

    def _expect_reading(self) -> None:
        """Make the event loop call `pause_writing` as soon as any bytes wait to be read."""
        self.transport.set_write_buffer_limits(0)

    def _expect(self, seconds: float | None) -> None:
        """Set the deadline for what must arrive next to `seconds` from now; None removes it."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if seconds is not None:
            self._deadline = self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        self._deadline = None
        if self._pending_bytes == 0 and (self.cycle is None or self.cycle.response_complete):
            # The client has sent no request, so there is nothing to answer.
            self.transport.close()
        else:
            message = "the request did not arrive in time"
            self._refuse(OutriderError(Reason.REQUEST_TIMEOUT, message))

    def _path(self) -> str:
        return self.url.partition(b"?")[0].decode("latin-1")

    def _refuse(self, error: OutriderError) -> None:
        """Answer with the error unless a response has started, and close the connection."""
        running = self.cycle is not None and not self.cycle.response_complete
        if not (running and self.cycle.response_started):
            own_id = self._log_refusal(error, running=running)
            body = body_for(self._path(), error, own_id)
            content = json.dumps(body, separators=(",", ":")).encode()
            head = [
                STATUS_LINE[error.reason.kind.http],
                b"content-type: application/json\r\nconnection: close\r\n",
                b"x-request-id: %s\r\n" % own_id.encode(),
            ]
            self.transport.write(
                b"".join([*head, b"content-length: %d\r\n\r\n" % len(content), content])
            )
        self._expect_reading()
        if running:
            # Keep the application from writing anything more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _log_refusal(self, error: OutriderError, *, running: bool) -> str:
        """Write the refusal's access line; return the request's id.

        If the application has started the request, the application writes the line when the request
        ends. It ends soon, since the client counts as gone.
        """
        scope = cast(dict[str, Any] | None, self.scope) or {}
        access: Access | None = scope.get(access_log.SCOPE_KEY)
        if access is None or not running:
            # If the parser refused the first line, `self.headers` are still the headers of an
            # earlier request.
            fresh = {} if access is not None or not scope else dict(self.headers)
            headers = {
                name.decode("latin-1"): each.decode("latin-1") for name, each in fresh.items()
            }
            access = access_log.arrived(headers, "HTTP", self._path(), access_log.client_of(scope))
        access.refusal = error
        if running:
            scope[access_log.SCOPE_KEY] = access
        else:
            self.log_access.responded(access, "unknown", error.reason.kind.http)
        return access.request_id


def protocol(settings: GatewaySettings, log: AccessLog) -> type[asyncio.Protocol]:
    """Return a subclass of `BoundedProtocol` with the settings; it logs refusals to `log`."""
    members = {
        "needs_certificate": settings.public_tls_ca is not None,
        "log_access": log,
        "idle": {},
    }
    return cast(type[asyncio.Protocol], type("Connection", (BoundedProtocol,), members))


def _too_large() -> OutriderError:
    message = (
        f"the request line and headers are larger than {MAX_HEADER_BYTES} bytes, "
        f"or there are more than {MAX_HEADERS} headers"
    )
    return OutriderError(Reason.HEADERS_TOO_LARGE, message)
