"""The history of a campaign: JSON lines, each an event with its round and its times in seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def whole(events: Sequence[Event]) -> list[Event]:
    """Return the events without those of an interrupted last round.

    A round ends with an event "quiet", or with "trouble" if the campaign had to end.
    """
    last = max((event["round"] for event in events), default=-1)
    ends = {event["event"] for event in events if event["round"] == last}
    if last < 0 or ends & {"quiet", "trouble"}:
        return list(events)
    return [event for event in events if event["round"] < last]


class History:
    """Keeps events, and writes each as soon as it is added. `round` numbers the present round."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.events: list[Event] = []
        self.round = -1
        self._file = path.open("w")
        self._began = time.monotonic()

    def now(self) -> float:
        """Return the seconds since the campaign started."""
        return round(time.monotonic() - self._began, 3)

    def add(self, event: str, **fields: Any) -> None:
        """Record an event that ends now."""
        made = {"event": event, "round": self.round, "ended": self.now(), **fields}
        self.events.append(made)
        self._file.write(json.dumps(made) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
