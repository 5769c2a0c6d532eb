"""The sequences that wait for a place in the batch, shared fairly between tenants."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from verifier_svc.state.sequence import Sequence


class FairQueue:
    """Gives the next place to the tenant with the fewest running sequences.

    A tenant that floods the queue therefore cannot starve another tenant (max-min fairness). A
    tenant's own sequences are served in order of arrival.
    """

    def __init__(self) -> None:
        self._by_tenant: dict[str, deque[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for sequences in self._by_tenant.values():
            yield from sequences

    def add(self, sequence: Sequence) -> None:
        """Put a sequence behind the other sequences of its tenant."""
        self._by_tenant.setdefault(sequence.request.tenant, deque()).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Put back a sequence that has run before, ahead of its tenant's younger sequences."""
        own = self._by_tenant.setdefault(sequence.request.tenant, deque())
        younger = (i for i, other in enumerate(own) if other.arrival > sequence.arrival)
        own.insert(next(younger, len(own)), sequence)

    def first(self, running: Mapping[str, int]) -> Sequence:
        """Return the sequence whose turn it is, given each tenant's number of running sequences.

        The queue must not be empty. If several tenants have equally few running sequences, the
        tenant whose first sequence arrived earliest has its turn.
        """
        heads = [sequences[0] for sequences in self._by_tenant.values()]
        if len(heads) == 1:
            return heads[0]
        return min(heads, key=lambda head: (running.get(head.request.tenant, 0), head.arrival))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out. Does nothing if the sequence is not in the queue."""
        tenant = sequence.request.tenant
        own = self._by_tenant.get(tenant)
        if own is not None and sequence in own:
            own.remove(sequence)
            if not own:
                del self._by_tenant[tenant]

    def to_displace(self, tenant: str) -> Sequence | None:
        """Return the sequence that a sequence of `tenant` displaces from a full queue, or None.

        The tenant with the most waiting sequences loses its youngest sequence that never ran, here
        or at another verifier. After that it must still have at least as many waiting sequences as
        `tenant` has with its new sequence, so that the two tenants cannot displace each other in
        turns.
        """
        longest = max(self._by_tenant.values(), key=len, default=deque())
        own = len(self._by_tenant.get(tenant, ()))
        if len(longest) - 1 <= own:
            return None
        return next((each for each in reversed(longest) if not each.has_begun), None)
