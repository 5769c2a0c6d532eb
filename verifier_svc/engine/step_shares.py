"""Divides a step between tenants: the sequences to decode, and the prompt tokens to read.

A tenant that has used little goes first. This tenant's next token comes only when the step ends, so
the time that other tenants add to the step is bounded. With one tenant, a step takes all it can,
unless another tenant may come back at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from typing import NamedTuple

from verifier_svc.engine.tenant_use import TenantUse
from verifier_svc.policy.forward_cost import ForwardCost
from verifier_svc.state.sequence import Sequence

# The bound of a step's time, in multiples of the smallest step's time. It holds while the step
# serves a tenant that has used little, or while another tenant may come back at any moment and
# would wait for the step's end. On a GPU the bound mostly cuts nothing, because there a forward
# with more rows takes little longer. In a step that reaches the bound, the fixed cost of a forward
# is at most 1/4 of the time.
_LONGEST = 4.0
# Work of other tenants lengthens the step of a light tenant by at most this share.
_ADDED = 0.25
# A step that would otherwise do nothing reads at least this many tokens of prompts.
_LEAST_PROMPT_TOKENS = 16

Drafted = Callable[[Sequence], int]
"""Returns the number of draft tokens of a sequence in the next step."""


class PromptPart(NamedTuple):
    """A sequence whose prompt the step reads: at most `most` of its `pending` uncomputed tokens."""

    sequence: Sequence
    pending: int
    most: int


class StepParts(NamedTuple):
    """The sequences of a step: those that it decodes, and those whose prompts it reads."""

    decoding: list[Sequence]
    """These sequences have one uncomputed token each."""
    prefill: list[PromptPart]


class StepShares:
    """Divides the steps of one engine, on the engine's thread."""

    def __init__(self, cost: ForwardCost, use: TenantUse, max_batch_tokens: int) -> None:
        self._cost = cost
        self._use = use
        self._max_batch_tokens = max_batch_tokens
        # When not all decoding sequences have room in a step, the next step goes on after the last
        # sequence that had room. These are the ids of the last such sequence of light tenants, and
        # of the last such sequence of other tenants.
        self._last_light = 0
        self._last_heavy = 0

    def divide(
        self, running: List[Sequence], tenants: Mapping[str, int], drafted: Drafted
    ) -> StepParts:
        """Return the sequences and prompt tokens of the next step.

        `tenants` maps a tenant to its number of running sequences.
        """
        light: frozenset[str] = frozenset()
        bounded = False
        if self._cost.known:
            light = self._use.light(tenants)
            bounded = bool(light) or self._use.expects(tenants)
        parts = _all_of(running)
        if bounded:
            return self._bounded(parts, light, drafted)
        if len(tenants) > 1:
            most = self._max_batch_tokens - len(parts.decoding)
            parts = parts._replace(prefill=_cut(parts.prefill, most))
        return parts

    def _bounded(self, parts: StepParts, light: frozenset[str], drafted: Drafted) -> StepParts:
        """Return a step of bounded time.

        If there are light tenants, their work fills the step up to `_LONGEST`. The work of other
        tenants then lengthens the step by at most the share `_ADDED`. Without light tenants, the
        work of the other tenants fills the step up to `_LONGEST`.
        """
        fill = _Fill(self._cost, self._max_batch_tokens, drafted)
        room_s = _LONGEST * self._cost.estimate(1, 1)
        if light:
            own, parts = _split(parts, light)
            self._last_light = fill.add(own, room_s, self._last_light)
            room_s = _ADDED * fill.seconds
        self._last_heavy = fill.add(parts, room_s, self._last_heavy)
        return StepParts(fill.decoding, fill.prefill)


class _Fill:
    """A step that is filled up to a time limit.

    An empty step takes some work even if that work exceeds the limit.
    """

    def __init__(self, cost: ForwardCost, max_batch_tokens: int, drafted: Drafted) -> None:
        self.decoding: list[Sequence] = []
        self.prefill: list[PromptPart] = []
        self._cost = cost
        self._max_batch_tokens = max_batch_tokens
        self._drafted = drafted
        self._rows = 0
        self._prompt_tokens = 0

    @property
    def seconds(self) -> float:
        """The seconds that the step takes as filled so far."""
        return self._decoding_s(self._rows) + self._cost.prompts_s(self._prompt_tokens)

    def _decoding_s(self, rows: int) -> float:
        return self._cost.estimate(len(self.decoding), rows) if self.decoding else 0.0

    def add(self, parts: StepParts, room_s: float, last_id: int) -> int:
        """Add work that lengthens the step by at most `room_s`.

        If there are prompts, decoding gets at most half of this time, and prompts get what is left.
        Decoding begins after the sequence `last_id`. Returns the id of the last of the `parts`'
        sequences that had room, or `last_id` if all or none had room.
        """
        before_s = self.seconds
        decoding_s = room_s / 2 if parts.prefill else room_s
        last_id = self._add_decoding(parts.decoding, decoding_s, last_id)
        left_s = room_s - max(self.seconds - before_s, 0.0)
        tokens = self._cost.prompt_tokens_in(left_s)
        if not self.decoding and not self.prefill:
            tokens = max(tokens, _LEAST_PROMPT_TOKENS)
        most = self._max_batch_tokens - len(self.decoding) - self._prompt_tokens
        prefill = _cut(parts.prefill, min(tokens, most))
        self.prefill += prefill
        self._prompt_tokens += sum([part.most for part in prefill])
        return last_id

    def _add_decoding(self, decoding: list[Sequence], room_s: float, last_id: int) -> int:
        before_s = self._decoding_s(self._rows)
        after = [sequence for sequence in decoding if sequence.id > last_id]
        others = [sequence for sequence in decoding if sequence.id <= last_id]
        last_added = last_id
        for sequence in after + others:
            rows = self._rows + 1 + self._drafted(sequence)
            after_s = self._cost.estimate(len(self.decoding) + 1, rows)
            if after_s - before_s > room_s and (self.decoding or self.prefill):
                return last_added
            self._rows = rows
            self.decoding.append(sequence)
            last_added = sequence.id
        return last_id


def _all_of(running: List[Sequence]) -> StepParts:
    """Return a step with all tokens that these sequences need."""
    parts = StepParts([], [])
    for sequence in running:
        pending = sequence.num_uncomputed_tokens
        if pending == 1:
            parts.decoding.append(sequence)
        else:
            parts.prefill.append(PromptPart(sequence, pending, pending))
    return parts


def _split(parts: StepParts, light: frozenset[str]) -> tuple[StepParts, StepParts]:
    """Return the parts of light tenants, and the parts of all other tenants."""
    own, others = StepParts([], []), StepParts([], [])
    for sequence in parts.decoding:
        (own if sequence.request.tenant in light else others).decoding.append(sequence)
    for part in parts.prefill:
        (own if part.sequence.request.tenant in light else others).prefill.append(part)
    return own, others


def _cut(prefill: list[PromptPart], most: int) -> list[PromptPart]:
    """Return the prompts cut to at most `most` tokens in all, shared between their tenants."""
    wanted: dict[str, int] = {}
    for part in prefill:
        tenant = part.sequence.request.tenant
        wanted[tenant] = wanted.get(tenant, 0) + part.most
    left = max_min(wanted, max(most, 0))
    parts = []
    for part in prefill:
        tenant = part.sequence.request.tenant
        tokens = min(part.most, left[tenant])
        if tokens:
            left[tenant] -= tokens
            parts.append(part._replace(most=tokens))
    return parts


def max_min(wanted: Mapping[str, int], total: int) -> dict[str, int]:
    """Divide `total` so that a tenant can gain only if a tenant with less loses (max-min).

    A tenant that wants less than an equal share gets what it wants. The other tenants share what is
    left.
    """
    shares: dict[str, int] = {}
    left = total
    for place, (name, count) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        shares[name] = min(count, left // (len(wanted) - place))
        left -= shares[name]
    return shares
