"""Reads a streamed completion from the socket.

A client library would use more processor time than the measured gateway does.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any


class FailedAnswer(RuntimeError):
    """An answer that did not come to its end."""

    def __init__(self, problem: str, last: bytes) -> None:
        text = last.decode(errors="replace")
        super().__init__(f"{problem}: {text}")
        found = re.search(r'"code": ?"(\w+)"', text)
        self.code = found[1] if found else "hung_up"
        """The code of the gateway's error; `hung_up` if it gave none."""


def asks(body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    """Return the bytes of a request `POST /v1/completions`."""
    content = json.dumps(body).encode()
    # With `Connection: close`, the server hangs up even after an error. Without it, the error would
    # look like a slow answer.
    fields = {
        "Host": "localhost",
        "Connection": "close",
        "Content-Type": "application/json",
        **headers,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return (
        f"POST /v1/completions HTTP/1.1\r\n{head}Content-Length: {len(content)}\r\n\r\n".encode()
        + content
    )


async def stream(
    port: int, body: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncIterator[bytes]:
    """Yield the answer of `POST /v1/completions` as it arrives.

    Raises FailedAnswer if the connection closes before the end of the stream, or if the stream ends
    with an error.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(asks(body, headers))
        last = b""
        while b"[DONE]" not in last:
            block = await reader.read(65_536)
            if not block:
                raise FailedAnswer("the gateway hung up", last)
            yield block
            last = last[-500:] + block
        if b'data: {"error"' in last:
            raise FailedAnswer("the answer failed", last)
    finally:
        writer.close()
        await writer.wait_closed()
