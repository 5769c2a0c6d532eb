"""Gathers into batches the messages that wait to be sent."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

MAX_BATCH_BYTES = 2**20
"""The largest size of a batch in bytes, unless a single message is larger."""

_Message = TypeVar("_Message", bound=Message)


def take_batch(unsent: list[_Message]) -> tuple[list[_Message], int]:
    """Take from the front of `unsent` as many messages as fit, at least the first if there is one.

    Returns these messages and their size in bytes.
    """
    count = 0
    byte_count = 0
    for message in unsent:
        size = message.ByteSize()
        if count and byte_count + size > MAX_BATCH_BYTES:
            break
        byte_count += size
        count += 1
    batch = unsent[:count]
    del unsent[:count]
    return batch, byte_count
