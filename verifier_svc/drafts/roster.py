"""Who drafts: the connected drafters, what is known of each, and which of them a sequence is handed to."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any

from outrider.clock import Clock, monotonic
from outrider.errors import OutriderError, Reason
from outrider.messages import SpeculationOptions
from outrider.model_info import DrafterInfo
from verifier_svc.state.drafter import Drafter

_FAULTS_ALLOWED = 3
_QUARANTINE_S = 30.0
_MISSED_S = 600.0
# When to try again where there are as many drafters as there may be.
_FULL_S = 5.0
_REMEMBERED = 256
_MAX_DRAFTERS = 64
# Names in an error's message, which travels in the call's metadata.
_NAMED = 20


class Roster:
    """All drafters: connected ones, at most `max_drafters`, and those that were lost without a goodbye."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self.max_drafters = _MAX_DRAFTERS
        self.connected: dict[str, Drafter] = {}
        # Those that left, and when, the longest gone first.
        self._gone: dict[str, tuple[float, Drafter]] = {}
        self._faults: dict[str, list[float]] = {}

    def join(self, drafter: Drafter) -> None:
        """Raises OutriderError when the id is taken, or in quarantine after repeated protocol violations, or there are too many."""
        if (left_s := self._quarantine_s(drafter.id)) > 0:
            message = f"drafter {drafter.id} broke the protocol {_FAULTS_ALLOWED} times and is in quarantine for {ceil(left_s)} s more"
            raise OutriderError(Reason.QUARANTINED, message, retry_after_s=left_s)
        if drafter.id in self.connected:
            raise OutriderError(
                Reason.DRAFTER_ID_TAKEN,
                f"a drafter with the id {drafter.id} is connected",
                "hello.drafter_id",
            )
        if len(self.connected) >= self.max_drafters:
            message = (
                f"{self.max_drafters} drafters are connected, and --max-drafters allows no more"
            )
            raise OutriderError(Reason.OVERLOADED, message, retry_after_s=_FULL_S)
        self.connected[drafter.id] = drafter
        self._gone.pop(drafter.id, None)

    def leave(self, drafter: Drafter) -> None:
        if self.connected.get(drafter.id) is not drafter:
            return
        del self.connected[drafter.id]
        drafter.sequence_ids.clear()
        self._gone[drafter.id] = (self._clock(), drafter)

    def forget(self) -> list[str]:
        """Forget those that left long ago, or before many others, since ids are theirs to choose; who they were."""
        forgotten: list[str] = []
        since = self._clock() - _MISSED_S
        for drafter_id, (left_at, _) in self._gone.items():
            if left_at > since and len(self._gone) - len(forgotten) <= _REMEMBERED:
                break
            forgotten.append(drafter_id)
        for drafter_id in forgotten:
            del self._gone[drafter_id]
        return forgotten

    def fault(self, drafter: Drafter) -> None:
        """Count a protocol violation."""
        self._faults[drafter.id] = [*self._faults.pop(drafter.id, []), self._clock()][
            -_FAULTS_ALLOWED:
        ]
        _drop_oldest(self._faults)

    def _quarantine_s(self, drafter_id: str) -> float:
        """Seconds for which the id is still kept out: for so long after as many violations within so long."""
        faults = self._faults.get(drafter_id, [])
        if len(faults) < _FAULTS_ALLOWED or faults[-1] - faults[0] >= _QUARANTINE_S:
            return 0.0
        return faults[-1] + _QUARANTINE_S - self._clock()

    def choose(self, options: SpeculationOptions, assigned: Iterable[str]) -> list[Drafter]:
        """The drafters to hand a sequence to besides those `assigned` (ids): of each family that may draft, the least busy one."""
        if not options.enabled:
            return []
        names = set(assigned)
        covered = {self.connected[name].hello.family for name in names if name in self.connected}
        chosen: dict[str, Drafter] = {}
        for drafter in self.connected.values():
            family = drafter.hello.family
            wanted = options.drafter in ("", family, drafter.id)
            if not wanted or drafter.id in names or family in covered or not drafter.open_to_more:
                continue
            if family not in chosen or len(drafter.sequence_ids) < len(chosen[family].sequence_ids):
                chosen[family] = drafter
        return list(chosen.values())

    def check_known(self, name: str) -> None:
        """Raises OutriderError(DRAFTER_NOT_FOUND) for a name that no drafter has or had, by id or by family."""
        known = [*self.connected.values(), *self._missed()]
        names = sorted(
            {drafter.id for drafter in known} | {drafter.hello.family for drafter in known}
        )
        if name and name not in names:
            listed = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
            message = f"speculation.drafter must be one of {listed or '(no drafter is connected)'}, not {name}"
            raise OutriderError(Reason.DRAFTER_NOT_FOUND, message, "speculation.drafter")

    def infos(self) -> tuple[DrafterInfo, ...]:
        connected = [drafter.info(True) for drafter in self.connected.values()]
        return (*connected, *(drafter.info(False) for drafter in self._missed()))

    def _missed(self) -> list[Drafter]:
        """Drafters that were lost a short while ago; one that is gone for longer is not expected back."""
        since = self._clock() - _MISSED_S
        return [
            drafter
            for left_at, drafter in self._gone.values()
            if left_at > since and not drafter.draining
        ]


def _drop_oldest(names: dict[str, Any]) -> None:
    """Ids are the drafters' to choose, so what is remembered of them is bounded."""
    while len(names) > _REMEMBERED:
        del names[next(iter(names))]
