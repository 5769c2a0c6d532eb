"""Keeps the connected, lost and quarantined drafters, and chooses the drafters of a sequence."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import ceil
from typing import Any

from outrider.errors import OutriderError, Reason
from outrider.process.clock import Clock, monotonic
from outrider.protocol.messages import SpeculationOptions, TokenRequest
from outrider.protocol.model_info import DrafterInfo
from verifier_svc.state.drafter import Drafter

_FAULTS_TO_QUARANTINE = 3
_QUARANTINE_S = 30.0
_MISSED_S = 600.0
# For this long a drafter that said goodbye still counts as known, because it may come back at once
# with new weights.
_REJOIN_S = 10.0
# A drafter that was refused for lack of room should try again after this time.
_FULL_S = 5.0
# The roster remembers faults for this many names.
_REMEMBERED = 256
MOST_LOST = 32
"""The maximum number of drafters that left and are remembered.

Metrics name them all; the gateway's page and /readyz name only those that left without a goodbye.
"""
_MAX_DRAFTERS = 64
# Drafters of one source may have at most this share of the `max_drafters` connections, so that no
# source takes every connection.
_SOURCE_SHARE = 0.25
# The maximum number of drafters of a sequence. The limit bounds the cost of drafters in a step,
# however many are connected.
PLACES = 4


class Roster:
    """The connected drafters, and the drafters that left in the last ten minutes.

    At most `max_drafters` are connected. One source may have at most a quarter of `max_drafters`.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self.max_drafters = _MAX_DRAFTERS
        self.connected: dict[str, Drafter] = {}
        """Keyed by id."""
        # Maps the id of a drafter to the time when it left (seconds). The drafter that left first
        # comes first.
        self._gone: dict[str, tuple[float, Drafter]] = {}
        self._turns = 0
        # Times of violations, keyed by `Drafter.blamed`.
        self._faults: dict[str, list[float]] = {}

    def join(self, drafter: Drafter) -> None:
        """Register a drafter.

        Raises OutriderError: QUARANTINED after repeated protocol violations of its id (with TLS, of
        any drafter with its certificate's name), DRAFTER_ID_TAKEN if its id is connected, or
        OVERLOADED if too many drafters are connected, from its source or in all.
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
        own = [each for each in self.connected.values() if each.source == drafter.source]
        if drafter.source and len(own) >= max(1, int(_SOURCE_SHARE * self.max_drafters)):
            message = (
                f"{len(own)} drafters of {drafter.source} are connected, a quarter of"
                " --max-drafters; one certificate's name or one address may have no more"
            )
            raise OutriderError(Reason.OVERLOADED, message, retry_after_s=_FULL_S)
        if len(self.connected) >= self.max_drafters:
            message = (
                f"{self.max_drafters} drafters are connected, and --max-drafters allows no more"
            )
            raise OutriderError(Reason.OVERLOADED, message, retry_after_s=_FULL_S)
        self._take_turn(drafter)
        self.connected[drafter.id] = drafter
        _, earlier = self._gone.pop(drafter.id, (0.0, None))
        if earlier is not None:
            drafter.succeed(earlier)

    def leave(self, drafter: Drafter) -> None:
        """Remove a drafter whose stream has ended; no effect if it is not connected."""
        if self.connected.get(drafter.id) is not drafter:
            return
        del self.connected[drafter.id]
        drafter.sequence_ids.clear()
        self._gone[drafter.id] = (self._clock(), drafter)

    def forget(self) -> list[str]:
        """Forget drafters that left long ago; return their ids.

        Since drafters choose their ids, only the MOST_LOST drafters that left last are kept.
        """
        forgotten: list[str] = []
        since = self._clock() - _MISSED_S
        for drafter_id, (left_at, _) in self._gone.items():
            if left_at > since and len(self._gone) - len(forgotten) <= MOST_LOST:
                break
            forgotten.append(drafter_id)
        for drafter_id in forgotten:
            del self._gone[drafter_id]
        return forgotten

    def count_fault(self, drafter: Drafter) -> None:
        """Record a violation.

        After several violations in a short time, `join` refuses the drafter.
        """
        faults = [*self._faults.pop(drafter.blamed, []), self._clock()]
        self._faults[drafter.blamed] = faults[-_FAULTS_TO_QUARANTINE:]
        _drop_oldest(self._faults)

    def _quarantine_left_s(self, name: str) -> float:
        """Return for how many seconds this id or certificate's name is still refused.

        `_FAULTS_TO_QUARANTINE` violations within `_QUARANTINE_S` start a quarantine of that
        duration.
        """
        faults = self._faults.get(name, [])
        if len(faults) < _FAULTS_TO_QUARANTINE or faults[-1] - faults[0] >= _QUARANTINE_S:
            return 0.0
        return faults[-1] + _QUARANTINE_S - self._clock()

    def choose(
        self, request: TokenRequest, assigned: Iterable[str], past: Collection[str] = ()
    ) -> list[Drafter]:
        """Return the drafters to add to a sequence's `assigned` drafters; none has an id in `past`.

        The request allows each of them, and has a grammar if the drafter requires one. A sequence
        has at most `PLACES` drafters in all. Assigned drafters that became doubtful do not count:
        the caller takes the sequence from them if their places are needed.

        Proven drafters come first: from each family that the sequence lacks, the drafter with the
        fewest sequences. If there are more families than places, the drafters with the most merit
        get the places. One place is left to a drafter on trial or a doubtful drafter, if there is
        one. Drafters on trial come next, in turn, one of each family. One doubtful drafter comes
        last, if no assigned drafter is doubtful. It must have no other sequence, unless the request
        names a drafter or family.
        """
        options = request.speculation
        if not options.enabled:
            return []
        present = [self.connected[name] for name in assigned if name in self.connected]
        found = [
            drafter
            for drafter in self.connected.values()
            if drafter not in present
            and drafter.id not in past
            and drafter.accepts_sequences
            and _allows(request, drafter)
        ]
        awake = [each for each in present if not each.is_doubtful]
        proven = _by_family([each for each in found if each.proven and not each.silent], awake)
        fresh = [each for each in found if each.on_trial]
        newcomers = _by_family(fresh, [each for each in present if each.on_trial])
        doubtful = [each for each in found if each.is_doubtful]
        named = options.drafter_id or options.drafter_family
        if not named:
            doubtful = [each for each in doubtful if not each.sequence_ids]
        places = max(PLACES - len(awake), 0)
        kept = min(places, 1) if newcomers or doubtful else 0
        chosen = sorted(proven, key=lambda each: -each.merit)[: places - kept]
        chosen += newcomers[: places - len(chosen)]
        if len(chosen) < places and doubtful and len(awake) == len(present):
            chosen.append(min(doubtful, key=_next_turn))
        for drafter in chosen:
            self._take_turn(drafter)
        return chosen

    def _take_turn(self, drafter: Drafter) -> None:
        self._turns += 1
        drafter.turn = self._turns

    def check_known(self, options: SpeculationOptions) -> None:
        """Raise OutriderError(DRAFTER_NOT_FOUND) if no drafter has the named id or family.

        Drafters that were lost or said goodbye a short while ago count as well. Options that name
        no drafter and no family are accepted. The error does not name other drafters, because any
        tenant may see it.
        """
        since = self._clock() - _REJOIN_S
        rejoining = [drafter for left_at, drafter in self._gone.values() if left_at > since]
        known = [*self.connected.values(), *self._missed(), *rejoining]
        field = "speculation.drafter_id"
        if options.drafter_id and options.drafter_id not in [each.id for each in known]:
            message = f"no drafter with the id {options.drafter_id} is connected (yet)"
            raise OutriderError(Reason.DRAFTER_NOT_FOUND, f"{field}: {message}", field)
        field = "speculation.drafter_family"
        families = [each.hello.family for each in known]
        if options.drafter_family and options.drafter_family not in families:
            message = f"no drafter of the family {options.drafter_family} is connected (yet)"
            raise OutriderError(Reason.DRAFTER_NOT_FOUND, f"{field}: {message}", field)

    def infos(self) -> tuple[DrafterInfo, ...]:
        """Return the API's record of each drafter, connected or lost a short while ago."""
        connected = [drafter.info(True) for drafter in self.connected.values()]
        return (*connected, *(drafter.info(False) for drafter in self._missed()))

    def _missed(self) -> list[Drafter]:
        """Return drafters that were lost in the last ten minutes without draining."""
        since = self._clock() - _MISSED_S
        return [
            drafter
            for left_at, drafter in self._gone.values()
            if left_at > since and not drafter.draining
        ]


def _allows(request: TokenRequest, drafter: Drafter) -> bool:
    """Return whether the request may have this drafter, and the drafter can draft for it."""
    options = request.speculation
    hello = drafter.hello
    if hello.requires_grammar and request.grammar is None:
        return False
    by_id = options.drafter_id in ("", drafter.id)
    return by_id and options.drafter_family in ("", hello.family)


def _next_turn(drafter: Drafter) -> tuple[int, int]:
    """Return the sort key of a drafter: fewest sequences first, then the longest wait."""
    return len(drafter.sequence_ids), drafter.turn


def _by_family(drafters: list[Drafter], present: list[Drafter]) -> list[Drafter]:
    """Return one of `drafters` for each family that no drafter in `present` has.

    `_next_turn` decides which drafter of a family is returned, and the order of the result.
    """
    covered = {drafter.hello.family for drafter in present}
    chosen: list[Drafter] = []
    for drafter in sorted(drafters, key=_next_turn):
        if drafter.hello.family not in covered:
            covered.add(drafter.hello.family)
            chosen.append(drafter)
    return chosen


def _drop_oldest(names: dict[str, Any]) -> None:
    """Keep only the last `_REMEMBERED` entries, since drafters choose their ids without limit."""
    while len(names) > _REMEMBERED:
        del names[next(iter(names))]
