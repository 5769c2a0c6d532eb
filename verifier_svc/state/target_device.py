"""Says where the target computes, and whether a drafter shares that device."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from outrider.protocol.model_info import Placement


@dataclass(frozen=True, slots=True)
class TargetDevice:
    """The device where the target computes, if a drafter on the same device would slow it down.

    `cores` are cores of this host; empty if the target computes on a GPU or leaves cores to
    drafters.
    """

    cores: frozenset[int] = frozenset()
    gpu_uuids: frozenset[str] = frozenset()

    @classmethod
    def of_cpu(cls, thread_count: int) -> TargetDevice:
        """Return the device of a target that computes on this process's cores.

        Its `cores` are empty if the target's threads leave some cores to drafters.
        """
        cores = os.sched_getaffinity(0)
        return cls(frozenset(cores) if thread_count >= len(cores) else frozenset())

    def is_shared(self, place: Placement) -> bool:
        """Return whether a drafter at this place computes on the target's GPU or cores."""
        if not place.device.startswith("cpu"):
            return place.gpu_uuid in self.gpu_uuids
        if not self.cores or place.host != platform.node():
            return False
        return not place.cores or not self.cores.isdisjoint(place.cores)


NO_DEVICE = TargetDevice()
"""A device that no drafter shares."""
