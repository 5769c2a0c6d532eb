"""Bounds and decompresses the bodies of HTTP requests before the application reads them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api_errors import error_response
from outrider.errors import OutriderError, Reason

MAX_BODY_BYTES = 4 * 1024 * 1024
"""The maximum size of a decompressed body: enough for the text of a million tokens. With
this maximum, the bodies of all requests that can arrive at once fit in 1 GiB of memory."""

_Headers = Iterable[tuple[bytes, bytes]]

# The window sizes with which zlib reads the header of each format.
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
_UNENCODED = ("", "identity")
_CHANGED = (b"content-encoding", b"content-length")


class BodyLimit:
    """Refuses a body above MAX_BODY_BYTES with 413 before the body is held in memory.

    A body in gzip or deflate is decompressed, and the limit holds for the decompressed body. Any
    other Content-Encoding except identity is refused with 415.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        encoding = _encoding(scope["headers"])
        if encoding not in _UNENCODED and encoding not in _WINDOW_BITS:
            await _unsupported(encoding, scope)(scope, receive, send)
            return
        decoder = None
        announced = _announced(scope["headers"])
        if encoding in _WINDOW_BITS:
            decoder = _Decoder(encoding)
            kept = [header for header in scope["headers"] if header[0] not in _CHANGED]
            scope = {**scope, "headers": kept}
        received = 0

        async def bounded() -> Message:
            nonlocal received
            if announced > MAX_BODY_BYTES:
                raise _too_large()
            message = await receive()
            if decoder is not None and message["type"] == "http.request":
                message = decoder.decode(message, MAX_BODY_BYTES + 1 - received)
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise _too_large()
            return message

        await self._app(scope, bounded, send)


def _too_large() -> OutriderError:
    message = f"the body is larger than {MAX_BODY_BYTES} bytes"
    return OutriderError(Reason.REQUEST_TOO_LARGE, message)


class _Decoder:
    """Decompresses the body of one request."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._zlib = zlib.decompressobj(_WINDOW_BITS[encoding])

    def decode(self, message: Message, most_bytes: int) -> Message:
        """Return the message with its body decompressed, at most the first `most_bytes`.

        Raises OutriderError(MALFORMED_REQUEST) for a body that is not in this encoding.
        """
        try:
            body = self._zlib.decompress(message.get("body", b""), most_bytes)
        except zlib.error as cause:
            raise self._malformed(f"the body is not in it: {cause}") from cause
        if self._zlib.unused_data:
            raise self._malformed("the body has more bytes after its end")
        more = message.get("more_body", False)
        if not more and not self._zlib.eof and len(body) < most_bytes:
            raise self._malformed("the body ends too early")
        return {**message, "body": body}

    def _malformed(self, problem: str) -> OutriderError:
        message = f"Content-Encoding is {self._encoding}, but {problem}"
        return OutriderError(Reason.MALFORMED_REQUEST, message)


def _unsupported(encoding: str, scope: Scope) -> ASGIApp:
    message = f"Content-Encoding must be gzip or deflate, or left out, not {encoding[:60]!r}"
    response = error_response(OutriderError(Reason.UNSUPPORTED_ENCODING, message), scope)
    response.headers["Accept-Encoding"] = "gzip, deflate"
    return response


def _encoding(headers: _Headers) -> str:
    """Return the encodings of the body in lower case, joined by commas; "" without a header."""
    values = [value for name, value in headers if name == b"content-encoding"]
    return b",".join(values).decode("latin-1").strip().lower()


def _announced(headers: _Headers) -> int:
    """Return the body's length according to its header; 0 without the header."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)
