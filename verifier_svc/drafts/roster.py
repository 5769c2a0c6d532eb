"""The drafters: the connected, the lost and those in quarantine, and which ones a sequence gets."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any

from outrider.clock import Clock, monotonic
from outrider.errors import OutriderError, Reason
from outrider.messages import SpeculationOptions
from outrider.model_info import DrafterInfo
from verifier_svc.state.drafter import Drafter

_FAULTS_TO_QUARANTINE = 3
_QUARANTINE_S = 30.0
_MISSED_S = 600.0
# After this time a drafter that found no room should try again.
_FULL_S = 5.0
_REMEMBERED = 256
_MAX_DRAFTERS = 64
# Names in an error's message, which travels in the call's metadata.
_NAMED = 20


class Roster:
    """The connected drafters, at most `max_drafters`, and those that left a short while ago."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self.max_drafters = _MAX_DRAFTERS
        self.connected: dict[str, Drafter] = {}
        """By id."""
        # Drafters that left, by id, with the time (seconds), the longest gone first.
        self._gone: dict[str, tuple[float, Drafter]] = {}
        # Times of violations, by `Drafter.blamed`.
        self._faults: dict[str, list[float]] = {}

    def join(self, drafter: Drafter) -> None:
        """Register a drafter.

        Raises OutriderError: QUARANTINED after repeated protocol violations of its id (with TLS, of
        any drafter with its certificate's name), DRAFTER_ID_TAKEN, or OVERLOADED if `max_drafters`
        are connected.
        """
        if (left_s := self._quarantine_left_s(drafter.blamed)) > 0:
            message = (
                f"drafter {drafter.blamed} broke the protocol {_FAULTS_TO_QUARANTINE} times"
                f" and is in quarantine for {ceil(left_s)} s more"
            )
            raise OutriderError(Reason.QUARANTINED, message, retry_after_s=left_s)
        if drafter.id in self.connected:
            message = f"a drafter with the id {drafter.id} is connected"
            raise OutriderError(Reason.DRAFTER_ID_TAKEN, message, "hello.drafter_id")
        if len(self.connected) >= self.max_drafters:
            message = (
                f"{self.max_drafters} drafters are connected, and --max-drafters allows no more"
            )
            raise OutriderError(Reason.OVERLOADED, message, retry_after_s=_FULL_S)
        self.connected[drafter.id] = drafter
        self._gone.pop(drafter.id, None)

    def leave(self, drafter: Drafter) -> None:
        """Remove a drafter whose stream has ended; no effect if it is not connected."""
        if self.connected.get(drafter.id) is not drafter:
            return
        del self.connected[drafter.id]
        drafter.sequence_ids.clear()
        self._gone[drafter.id] = (self._clock(), drafter)

    def forget(self) -> list[str]:
        """Forget drafters that left long ago; returns their ids.

        Since drafters choose their ids, only the last `_REMEMBERED` are kept.
        """
        forgotten: list[str] = []
        since = self._clock() - _MISSED_S
        for drafter_id, (left_at, _) in self._gone.items():
            if left_at > since and len(self._gone) - len(forgotten) <= _REMEMBERED:
                break
            forgotten.append(drafter_id)
        for drafter_id in forgotten:
            del self._gone[drafter_id]
        return forgotten

    def count_fault(self, drafter: Drafter) -> None:
        """Count a protocol violation; repeated ones put the drafter in quarantine."""
        faults = [*self._faults.pop(drafter.blamed, []), self._clock()]
        self._faults[drafter.blamed] = faults[-_FAULTS_TO_QUARANTINE:]
        _drop_oldest(self._faults)

    def _quarantine_left_s(self, name: str) -> float:
        """Seconds for which the id or certificate's name is still refused.

        `_FAULTS_TO_QUARANTINE` violations within `_QUARANTINE_S` start a quarantine of that
        duration.
        """
        faults = self._faults.get(name, [])
        if len(faults) < _FAULTS_TO_QUARANTINE or faults[-1] - faults[0] >= _QUARANTINE_S:
            return 0.0
        return faults[-1] + _QUARANTINE_S - self._clock()

    def choose(self, options: SpeculationOptions, assigned: Iterable[str]) -> list[Drafter]:
        """The drafters to assign a sequence to, besides those `assigned` (ids).

        Of each family that the request allows and that has none yet, the drafter with the fewest
        sequences.
        """
        if not options.enabled:
            return []
        names = set(assigned)
        covered = {self.connected[name].hello.family for name in names if name in self.connected}
        chosen: dict[str, Drafter] = {}
        for drafter in self.connected.values():
            family = drafter.hello.family
            if drafter.id in names or family in covered or not drafter.accepts_sequences:
                continue
            if options.drafter_id not in ("", drafter.id):
                continue
            if options.drafter_family not in ("", family):
                continue
            if family not in chosen or len(drafter.sequence_ids) < len(chosen[family].sequence_ids):
                chosen[family] = drafter
        return list(chosen.values())

    def check_known(self, options: SpeculationOptions) -> None:
        """Raises OutriderError(DRAFTER_NOT_FOUND) if the options name no drafter's id or family.

        Drafters that were lost a short while ago count. Options without a name pass.
        """
        known = [*self.connected.values(), *self._missed()]
        ids = {drafter.id for drafter in known}
        _check_listed("speculation.drafter_id", options.drafter_id, ids)
        families = {drafter.hello.family for drafter in known}
        _check_listed("speculation.drafter_family", options.drafter_family, families)

    def infos(self) -> tuple[DrafterInfo, ...]:
        """The API's record of each drafter, connected or lost a short while ago."""
        connected = [drafter.info(True) for drafter in self.connected.values()]
        return (*connected, *(drafter.info(False) for drafter in self._missed()))

    def _missed(self) -> list[Drafter]:
        """Drafters that were lost in the last ten minutes without draining."""
        since = self._clock() - _MISSED_S
        return [
            drafter
            for left_at, drafter in self._gone.values()
            if left_at > since and not drafter.draining
        ]


def _drop_oldest(names: dict[str, Any]) -> None:
    """Keep the last `_REMEMBERED` entries, since drafters choose their ids."""
    while len(names) > _REMEMBERED:
        del names[next(iter(names))]


def _check_listed(field: str, name: str, names: set[str]) -> None:
    """Raise DRAFTER_NOT_FOUND if the name is neither empty nor one of these."""
    if not name or name in names:
        return
    listed = ", ".join(sorted(names)[:_NAMED]) or "(no drafter is connected)"
    if len(names) > _NAMED:
        listed += ", ..."
    message = f"{field} must be one of {listed}, not {name}"
    raise OutriderError(Reason.DRAFTER_NOT_FOUND, message, field)
