"""Refuses requests with fields that this version does not know.

If a server ignored a field, such as a new sampling setting, the output would silently differ from
what the client asked for. Parsers of JSON refuse unknown fields and name them; protobuf keeps only
the numbers of unknown fields, with their values.
"""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from outrider.errors import OutriderError, Reason, invalid
from outrider.protocol.limits import MAX_MESSAGES


def check_known_fields(message: Message, path: str = "") -> None:
    """Check a message and all messages in it.

    Raises OutriderError(UNKNOWN_PARAMETER), whose `field` has the path of the message at fault and
    the unknown field's number, such as `sampling.99`; 99 alone is a field of the request itself.
    A list of more than MAX_MESSAGES messages is refused unread (INVALID_VALUE): a million empty
    messages fit into a request, and reading them would take seconds.
    """
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        holder = path or "the request"
        text = f"{holder} has a field with the number {number}, which this version does not know"
        field = f"{path}.{number}" if path else str(number)
        raise OutriderError(Reason.UNKNOWN_PARAMETER, text, field)
    for known, value in message.ListFields():
        # No entry of a map has unknown fields: protobuf keeps such an entry as an unknown field of
        # the message.
        if known.message_type is None or isinstance(value, Mapping):
            continue
        name = f"{path}.{known.name}" if path else known.name
        if isinstance(value, Message):
            check_known_fields(value, name)
        else:
            if len(value) > MAX_MESSAGES:
                problem = f"must hold at most {MAX_MESSAGES} messages, not {len(value)}"
                raise invalid(name, problem)
            for index, entry in enumerate(value):
                check_known_fields(entry, f"{name}[{index}]")
