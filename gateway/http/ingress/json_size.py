"""Bounds the number of values in a JSON text, before it is parsed."""

from __future__ import annotations

import json

from outrider.errors import OutriderError, Reason

MAX_STRINGS = 32_768
"""The maximum number of strings of a body, keys included."""
MAX_VALUES = 262_144
"""The maximum number of values of a body, such as the token ids of its prompts."""


def check_size(body: bytes, max_values: int = MAX_VALUES) -> None:
    """Check the numbers of strings and values in a JSON body before it is parsed.

    Raises OutriderError(REQUEST_TOO_LARGE) for more than MAX_STRINGS strings or `max_values`
    values, and OutriderError(MALFORMED_REQUEST) unless the body is UTF-8. The counts are exact for
    valid JSON, except that an empty list or object counts as two values. The parser refuses invalid
    JSON. The check takes about 10 ms for 4 MiB, since only methods of `bytes` look at every byte.
    """
    if not json.detect_encoding(body).startswith("utf-8"):
        raise OutriderError(Reason.MALFORMED_REQUEST, "the body must be JSON in UTF-8")
    if b"\\" in body:
        # Without escapes, every quotation mark begins or ends a string.
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 2 * MAX_STRINGS:
        message = f"the body holds more than {MAX_STRINGS} strings"
        raise OutriderError(Reason.REQUEST_TOO_LARGE, message)
    outside_strings = b"".join(body.split(b'"')[::2])
    # Each value except the first, with its key if it has one, follows one of these marks.
    value_count = 1
    for mark in (b",", b"[", b"{"):
        value_count += outside_strings.count(mark)
        if value_count > max_values:
            message = f"the body holds more than {max_values} values"
            raise OutriderError(Reason.REQUEST_TOO_LARGE, message)
