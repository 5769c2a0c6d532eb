"""Requests under way, as columns of arrays that grow and shrink together."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_COLUMNS: dict[str, type] = {
    "region": np.int64,
    "verifier": np.int64,
    "drafter": np.int64,
    "length": np.int64,
    "sent_at": np.float64,
    "away_s": np.float64,
    "first_at": np.float64,
    "served_until": np.float64,
    "left": np.float64,
    "stretch": np.float64,
    "waited": np.int64,
}


class Requests:
    """A row for each request. `drafter` is -1 for those without one; `left` are tokens to come.

    `away_s` is the round trip to another region, 0 at home. `first_at` is when the first token
    comes, `stretch` how much longer than the mean the request's tokens take. `waited` is 1 for
    those that found their verifier full.
    """

    region: NDArray[np.int64]
    verifier: NDArray[np.int64]
    drafter: NDArray[np.int64]
    length: NDArray[np.int64]
    sent_at: NDArray[np.float64]
    away_s: NDArray[np.float64]
    first_at: NDArray[np.float64]
    served_until: NDArray[np.float64]
    left: NDArray[np.float64]
    stretch: NDArray[np.float64]
    waited: NDArray[np.int64]

    def __init__(self, **columns: NDArray[Any]) -> None:
        """Columns that are not given are zeros, and `drafter` -1."""
        count = len(next(iter(columns.values()))) if columns else 0
        for name, kind in _COLUMNS.items():
            default: NDArray[Any] = np.full(count, -1 if name == "drafter" else 0, dtype=kind)
            setattr(self, name, np.asarray(columns.get(name, default), dtype=kind))

    def __len__(self) -> int:
        return len(self.region)

    def take(self, which: NDArray[Any]) -> Requests:
        """The rows of a mask or of indices."""
        return Requests(**{name: getattr(self, name)[which] for name in _COLUMNS})

    def add(self, others: Requests) -> None:
        """Append rows."""
        for name in _COLUMNS:
            setattr(self, name, np.concatenate([getattr(self, name), getattr(others, name)]))
