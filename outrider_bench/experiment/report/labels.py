"""Words for a sweep's values and for events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def words(value: Any) -> str:
    """A value of a sweep, as tables have it."""
    return " + ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def point_words(point: Mapping[str, Any]) -> str:
    """A cell by its values, such as `model, round_trip_ms 20, mbit_s 100`."""
    shown = [
        words(value) if path == "use" else f"{path.rpartition('.')[2]} {words(value)}"
        for path, value in point.items()
    ]
    return ", ".join(shown) or "the experiment"


def event_words(event: Mapping[str, Any]) -> str:
    """An event in short, such as `stop of near at 2 s`."""
    return f"{event['what']} of {event['who']} at {event['at']:.3g} s"
