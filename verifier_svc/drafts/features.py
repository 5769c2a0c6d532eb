"""Sends drafters the features that they asked for: chosen hidden states of committed tokens.

A token's features wait in its sequence's assignment to the drafter until the drafter is told of the
token. So a drafter that is not asked for drafts costs no messages.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.errors import OutriderError, invalid
from outrider.lm.hidden_states import FeatureProjection
from outrider.lm.streams import SharedRows
from outrider.protocol.draft_messages import FeatureRequest, FeatureRows, Features
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Assignment
from verifier_svc.state.sequence import Sequence as TokenSequence
from verifier_svc.verification.batch import Verified

# The maximum size of one entry's features (bytes). A message with one entry then has room for the
# other messages of the step.
_MAX_ENTRY_BYTES = 2**20
# If features of more than this many tokens wait for a drafter that is not asked, they are dropped
# when further features come. More tokens than this often lie between two probes.
_MAX_HELD_TOKENS = 64


class FeatureSource(Protocol):
    """A model that keeps hidden states, such as `outrider.lm.runner.ModelRunner`."""

    layer_count: int
    hidden_size: int
    projections: Mapping[str, FeatureProjection]
    """Maps names to the projections that turn a token's states into fewer numbers."""

    @property
    def kept(self) -> Container[int]:
        """The states that the last forward kept."""

    def can_watch(self, states: Collection[int]) -> bool:
        """Return whether forwards can keep these hidden states."""

    def watch(self, states: Collection[int]) -> None:
        """Keep these hidden states of each forward from now on."""

    def copy_states(
        self, states: Sequence[int], rows: Sequence[int], dtype: str, projection: str = ""
    ) -> bytes:
        """Return the kept `states` of the last forward's `rows`: each row's states, in order.

        With the name of a projection, return the projection's result for each row.
        """

    def share_states(
        self, states: Sequence[int], rows: Sequence[int], dtype: str, projection: str = ""
    ) -> SharedRows:
        """Return what `copy_states` returns, as a tensor on the target's device.

        The tensor has an entry for each row.
        """


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """A sequence's tokens that a forward has computed: committed tokens and accepted guesses."""

    sequence: TokenSequence
    start: int
    """Position of the first token."""
    rows: Sequence[int]
    """Their rows in the forward, in the order of the tokens."""
    draws: bool
    """True if the step draws a token, so that a verdict follows."""


@dataclass(slots=True)
class _Part:
    """Computed tokens whose features one drafter gets: their rows in the forward, and where the
    tokens are in the sequence."""

    sequence_id: int
    assignment: Assignment
    rows: Sequence[int]
    first_position: int
    waits: bool
    """True if the features wait for the verdict of the step. A step that draws no token has no
    verdict. Its features do not wait, because the drafter knows the prompt's tokens already."""


class FeatureSender:
    """Grants requests for features, and takes the features from each forward."""

    def __init__(self, source: FeatureSource | None) -> None:
        """Without a source, no request is granted."""
        self._source = source
        self.has_readers = False
        """True if a drafter gets features."""

    def grant(self, drafter: Drafter) -> None:
        """Set which features a drafter gets; none if the source lacks what the drafter asks for.

        Raises OutriderError(INVALID_VALUE) for a layer that the model does not have.
        """
        request, source = drafter.hello.feature_request, self._source
        if request is None or source is None:
            return
        for layer in request.aux_layers:
            if not 0 <= layer <= source.layer_count:
                name = "hello.feature_request.aux_layers"
                raise invalid(name, f"must be in [0, {source.layer_count}], not {layer}")
        if not source.can_watch(request.states):
            return
        drafter.feature_width = len(request.states) * source.hidden_size
        projection = source.projections.get(request.projection)
        # The drafter may ask for states that are not the projection's input.
        if projection is not None and list(projection.states) == request.states:
            drafter.feature_width = projection.projected_width
            drafter.projects_features = True

    def watch(self, drafters: Iterable[Drafter]) -> None:
        """From now on, keep from each forward the states that these drafters read."""
        if self._source is not None:
            requests = [each.hello.feature_request for each in drafters if each.feature_width]
            self.has_readers = bool(requests)
            self._source.watch({state for each in requests if each for state in each.states})

    def take(
        self,
        batch: Sequence[ScheduledSequence],
        found: Sequence[Verified | OutriderError | None],
    ) -> None:
        """Take the features of the last forward, before its tokens are committed.

        `found` has the result of each sequence, which is committed afterwards.
        """
        if self.has_readers:
            self.take_rows(_computed(batch, found))

    def take_rows(self, computed: Iterable[ComputedTokens]) -> None:
        """Take the features of tokens of the last forward, before the step is committed.

        A drafter that joined during the forward gets none if the forward did not keep the states
        that it reads.
        """
        if self._source is None:
            return
        kept = self._source.kept
        parts: dict[tuple[FeatureRequest, bool, bool], list[_Part]] = {}
        for tokens in computed:
            for assignment in tokens.sequence.assignments.values():
                drafter = assignment.drafter
                request = drafter.hello.feature_request
                if request is None or not assignment.takes_features:
                    continue
                part = _part(tokens, assignment, request)
                if part.rows and all(state in kept for state in request.states):
                    kind = request, drafter.projects_features, drafter.is_local
                    parts.setdefault(kind, []).append(part)
        for (request, projects, is_local), wanted in parts.items():
            self._take(request, wanted, projects=projects, is_local=is_local)

    def _take(
        self, request: FeatureRequest, parts: list[_Part], *, projects: bool, is_local: bool
    ) -> None:
        """Fetch the features that equal requests want, of all sequences at once.

        Features for a drafter in this process stay on the device. For other drafters they are
        copied.
        """
        assert self._source is not None
        rows = [row for part in parts for row in part.rows]
        name = request.projection if projects else ""
        take = self._source.share_states if is_local else self._source.copy_states
        data = take(request.states, rows, request.dtype.name.lower(), name)
        # `data` has `size` bytes for each token; if it is a tensor, it has one entry for each
        # token.
        size = len(data) // len(rows)
        for part in parts:
            end = len(part.rows) * size
            _send_or_hold(part, data[:end], size)
            data = data[end:]


def send_held_features(assignment: Assignment) -> None:
    """Send the drafter the features that waited, with the verdict of their tokens."""
    assignment.drafter.outbox.features += assignment.held_features
    assignment.held_features = []


def copy_held_features(assignment: Assignment) -> None:
    """Copy the features that have to wait beyond their step into memory of their own.

    The features of a drafter in the verifier's process are parts of a whole step's tensor, and
    would keep all of its memory. Other clients' prompts may have many rows in this tensor.
    """
    held = assignment.held_features
    for place in reversed(range(len(held))):
        rows = held[place].rows
        if isinstance(rows, bytes) or (alone := rows.alone()) is rows:
            return  # all earlier entries were copied before
        held[place] = replace(held[place], rows=alone)


def _computed(
    batch: Sequence[ScheduledSequence], found: Sequence[Verified | OutriderError | None]
) -> Iterator[ComputedTokens]:
    """Yield each sequence's committed tokens and accepted guesses in a step, in the batch's order.

    The last token of a repeated part is left out, and so are all tokens of a failed sequence.
    """
    first_row = 0
    for scheduled, result in zip(batch, found, strict=True):
        count = len(scheduled.token_ids)
        rows = [*range(first_row, first_row + count)]
        draws = False
        if isinstance(result, OutriderError):
            rows = []
        elif result is None:
            # The step is repeated: its last token is computed again.
            rows = rows[:-1]
        elif result.result is not None:
            draws = True
            rows += [first_row + count - 1 + row for row in result.result.rows]
        yield ComputedTokens(scheduled.sequence, scheduled.start, rows, draws)
        first_row += count + len(scheduled.draft.token_ids)


def _part(tokens: ComputedTokens, assignment: Assignment, request: FeatureRequest) -> _Part:
    """Return the tokens whose features the drafter wants and does not have yet."""
    first = assignment.feature_position
    if request.last_prompt_token_count is not None:
        prompt_count = len(tokens.sequence.request.prompt)
        first = max(first, prompt_count - request.last_prompt_token_count)
    known = max(0, first - tokens.start)
    rows = tokens.rows[known:]
    return _Part(tokens.sequence.id, assignment, rows, tokens.start + known, tokens.draws)


def _send_or_hold(part: _Part, data: FeatureRows, size: int) -> None:
    """Send or keep the features in `data`, which has `size` bytes or entries for each token."""
    assignment = part.assignment
    assignment.feature_position = part.first_position + len(part.rows)
    each = max(1, _MAX_ENTRY_BYTES // size)
    entries = [
        Features(
            part.sequence_id,
            part.first_position + at,
            data[at * size : (at + each) * size],
        )
        for at in range(0, len(part.rows), each)
    ]
    if not part.waits:
        assignment.drafter.outbox.features += entries
        return
    held = sum([len(entry.rows) for entry in assignment.held_features])
    if held > _MAX_HELD_TOKENS * size:
        assignment.held_features = []
    assignment.held_features += entries
