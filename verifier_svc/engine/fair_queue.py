"""The sequences that wait for a place in the batch, shared fairly between tenants."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from verifier_svc.state.sequence import Sequence


class FairQueue:
    """Gives the next place to the tenant with the fewest running sequences.

    So a tenant that floods the queue cannot starve another one (max-min fairness). A tenant's own
    sequences are served in order of arrival, and preempted sequences before all others.
    """

    def __init__(self) -> None:
        self._preempted: deque[Sequence] = deque()
        self._by_tenant: dict[str, deque[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._by_tenant.values()))

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        for sequences in self._by_tenant.values():
            yield from sequences

    def add(self, sequence: Sequence) -> None:
        """Put a sequence behind the others of its tenant."""
        self._by_tenant.setdefault(sequence.request.tenant, deque()).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence before all others."""
        self._preempted.appendleft(sequence)

    def first(self, running: Iterable[Sequence]) -> Sequence:
        """The sequence whose turn it is, given those that run. The queue must not be empty.

        Of tenants with equally many running sequences, the one that has waited longest is first.
        """
        if self._preempted:
            return self._preempted[0]
        heads = [sequences[0] for sequences in self._by_tenant.values()]
        if len(heads) == 1:
            return heads[0]
        counts = Counter(sequence.request.tenant for sequence in running)
        return min(heads, key=lambda head: (counts[head.request.tenant], head.id))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out. Does nothing if it is not in the queue."""
        tenant = sequence.request.tenant
        own = self._by_tenant.get(tenant)
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        elif own is not None and sequence in own:
            own.remove(sequence)
            if not own:
                del self._by_tenant[tenant]

    def to_displace(self, tenant: str) -> Sequence | None:
        """The sequence that loses its place in a full queue to one of `tenant`, if any does.

        It is the youngest of the tenant with the most waiting sequences, but none that began at
        another verifier. That tenant must keep at least as many as `tenant` then has, so the two
        cannot displace each other in turns.
        """
        longest = max(self._by_tenant.values(), key=len, default=deque())
        own = len(self._by_tenant.get(tenant, ()))
        if len(longest) - 1 <= own:
            return None
        return next((each for each in reversed(longest) if not each.request.committed), None)
