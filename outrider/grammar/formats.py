"""The formats of JSON schemas that are enforced, each as a pattern of the whole string.

The patterns match what RFC 3339, 3986, 5321, 4122, 6901 and the like allow, or a part of it. They
match no leap seconds. Patterns are ASCII, and mean the same in Python and ECMAScript.
"""

from __future__ import annotations

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR_MINUTE})"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _groups(most: int) -> str:
    return f"(?:{_GROUP}(?::{_GROUP}){{0,{most - 1}}})?" if most else ""


_SHORTENED = "|".join(f"{_groups(left)}::{_groups(7 - left)}" for left in range(8))
_IPV6 = f"(?:{_GROUP}(?::{_GROUP}){{7}}|{_SHORTENED})"

_ESCAPED = "%[0-9A-Fa-f]{2}"
_SAFE = "-A-Za-z0-9._~!$&'()*+,;="
_SEGMENT = f"(?:[{_SAFE}:@]|{_ESCAPED})"
_AUTHORITY = (
    rf"(?:(?:[{_SAFE}:]|{_ESCAPED})*@)?(?:\[{_IPV6}\]|(?:[{_SAFE}]|{_ESCAPED})*)(?::[0-9]*)?"
)
_SLASHED = f"(?:/{_SEGMENT}*)*"
_ROOTED = f"(?://{_AUTHORITY}{_SLASHED}|/(?:{_SEGMENT}+{_SLASHED})?)"
_TAIL = rf"(?:\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_ROOTED}|{_SEGMENT}+{_SLASHED})?{_TAIL}"
# The first segment of a relative path has no colon, which would end a scheme.
_RELATIVE = f"(?:{_ROOTED}|(?:[{_SAFE}@]|{_ESCAPED})+{_SLASHED})?{_TAIL}"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

_WHOLE = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "uri-reference": f"(?:{_URI}|{_RELATIVE})",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
PATTERNS = {name: f"^(?:{pattern})$" for name, pattern in _WHOLE.items()}
UNENFORCED = frozenset(
    ["idn-email", "idn-hostname", "iri", "iri-reference", "uri-template", "regex"]
)
"""Formats of JSON Schema that cannot be enforced. Formats that are neither here nor in `PATTERNS`,
such as int32, only describe a value."""
