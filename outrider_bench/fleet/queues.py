"""Chooses servers: a request goes to the server with the fewest requests.

Vectorised over many groups of servers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

ABSENT = 1 << 40
"""The load of a server that is not there or not up."""


def fill(loads: Ints, arrivals: Ints, room: int) -> Ints:
    """Count the arrivals that each server gets if each arrival goes to the least loaded server.

    `loads` has shape (groups, servers), `arrivals` shape (groups,), the result the shape of
    `loads`. No server exceeds `room`; arrivals that find no server with room are left out.
    """
    order = np.argsort(loads, axis=1, kind="stable")
    rising = np.take_along_axis(loads, order, axis=1)
    sums = np.cumsum(rising, axis=1)
    ranks = np.arange(1, loads.shape[1] + 1)
    # Arrivals that fill all less loaded servers up to this server's load. It gets a part of further
    # ones.
    needed = ranks * rising - sums
    taking = (needed < arrivals[:, None]).sum(axis=1)
    last = np.maximum(taking - 1, 0)
    total = np.take_along_axis(sums, last[:, None], axis=1)[:, 0] + arrivals
    level, rest = np.divmod(total, np.maximum(taking, 1))
    part = ranks <= taking[:, None]
    target = level[:, None] + (ranks <= rest[:, None])
    counts = np.where(part, np.minimum(target, room) - rising, 0)
    found = np.empty_like(loads)
    np.put_along_axis(found, order, np.maximum(counts, 0), axis=1)
    return found


def spread(counts: Ints, groups: Ints, names: Ints) -> Ints:
    """Choose servers for items, given each server's count from `fill`; -1 for items without one.

    `counts` and `names` have shape (groups, servers); `groups` says of which group each item is.
    """
    found = np.full(len(groups), -1, dtype=np.int64)
    items = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups, minlength=len(counts))
    placed = counts.sum(axis=1)
    starts = np.cumsum(sizes) - sizes
    within = np.arange(len(groups)) - np.repeat(starts, sizes)
    lucky = items[within < np.repeat(placed, sizes)]
    found[lucky] = np.repeat(names.ravel(), counts.ravel())
    return found
