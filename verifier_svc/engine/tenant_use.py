"""Measures how much step time each tenant has used recently; tenants with little use go first.

As in a fair-share scheduler, prompts, decoding and drafts count alike. The measure decays, so that
use of long ago is forgotten and no tenant can save up time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

# A tenant's use decays to 1/e in this time (seconds). A tenant without a step for twice this time
# is forgotten.
_MEMORY_S = 2.0
# A tenant is light if it has used less than this part of an equal share. Tenants with about the
# same use share steps, which compute more tokens a second than separate steps.
_LIGHT = 0.5
# Stored values do not decay at each step. Instead, new values are scaled up with time, by at most
# this power of e.
_LARGEST = 50.0


class TenantUse:
    """Measures how much each tenant uses an engine. Times are seconds of the engine's clock."""

    def __init__(self) -> None:
        # Keyed by tenant; the tenant that was served longest ago comes first in `_used`.
        self._used: dict[str, float] = {}
        self._served_at: dict[str, float] = {}
        self._epoch = 0.0

    def charge(self, rows: Mapping[str, int], seconds: float, now: float) -> None:
        """Divide the time of a step that ends `now` between tenants in proportion to their rows."""
        power = (now - self._epoch) / _MEMORY_S
        if not 0.0 <= power <= _LARGEST:
            self._move_epoch(now, power)
            power = 0.0
        total = max(sum(rows.values()), 1)
        value = seconds * math.exp(power) / total
        for tenant, count in rows.items():
            self._used[tenant] = self._used.pop(tenant, 0.0) + value * count
            self._served_at[tenant] = now
        while self._served_at[first := next(iter(self._used))] < now - 2 * _MEMORY_S:
            del self._used[first]
            del self._served_at[first]

    def _move_epoch(self, now: float, power: float) -> None:
        """Rescale stored values so that they count from `now`.

        A clock that was set back decays nothing.
        """
        factor = math.exp(-max(power, 0.0))
        self._used = {tenant: factor * used for tenant, used in self._used.items()}
        self._served_at = {tenant: min(at, now) for tenant, at in self._served_at.items()}
        self._epoch = now

    def light(self, tenants: Collection[str]) -> frozenset[str]:
        """Return the tenants that have used much less than the average of these tenants."""
        if len(tenants) < 2:
            return frozenset()
        used = {tenant: self._used.get(tenant, 0.0) for tenant in tenants}
        bound = _LIGHT * sum(used.values()) / len(used)
        return frozenset([tenant for tenant, own in used.items() if own < bound])

    def expects(self, tenants: Collection[str]) -> bool:
        """True if a tenant that was served recently is not among `tenants`, and may come back."""
        return bool(self._used.keys() - tenants)
