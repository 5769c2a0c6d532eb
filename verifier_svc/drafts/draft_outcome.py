"""Records the outcome of a verified draft, for its favourite path and for each drafter."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from verifier_svc.metrics import Metrics
from verifier_svc.state.draft_tree import DraftTree
from verifier_svc.state.sequence import Assignment, Sequence


def record_draft(
    metrics: Metrics,
    sequence: Sequence,
    assignment: Assignment,
    draft: DraftTree,
    rows: SequenceOf[int],
    emitted: int,
) -> None:
    """Count a verified draft, whose `rows` were accepted, in acceptance rates and metrics.

    `assignment` is that of the favourite path. The step `emitted` so many tokens of the sequence.
    """
    if draft.parents or draft.drafter_ids or draft.favoured is not None:
        _record_tree(metrics, sequence, assignment, draft, rows, emitted)
        return
    drafter = assignment.drafter
    drafted = len(draft.token_ids)
    accepted = len(rows)
    assignment.observe_acceptance(drafted, accepted)
    drafter.verified_count += drafted
    drafter.accepted_count += accepted
    metrics.verified(drafter, drafted, accepted, emitted)


def _record_tree(
    metrics: Metrics,
    sequence: Sequence,
    assignment: Assignment,
    draft: DraftTree,
    rows: SequenceOf[int],
    emitted: int,
) -> None:
    """As `record_draft`, for a draft with branches or of several drafters.

    The rate of an assignment is that of its favourites alone. The commit measures the guesses
    beside them, verified or not, see `observe_sides`.
    """
    own_id = assignment.drafter.id
    assignment.observe_acceptance(*favourite_outcome(draft, own_id, rows))
    for drafter_id, (drafted, places) in outcomes_by_drafter(draft, own_id, rows).items():
        drafter = sequence.assignments[drafter_id].drafter
        drafter.verified_count += drafted
        drafter.accepted_count += len(places)
        metrics.verified_in_tree(drafter, drafted, places, leads=drafter_id == own_id)
    favoured = favoured_count(rows[: draft.favoured])
    branched = bool(draft.parents)
    metrics.verified_draft(len(draft.token_ids), favoured, len(rows), emitted, branched=branched)


def favourite_outcome(draft: DraftTree, drafter_id: str, rows: SequenceOf[int]) -> tuple[int, int]:
    """The length of a drafter's own favourite path in a tree, and how much of it was accepted.

    The path ends where another drafter's guess continues it. `rows` are the accepted ones.
    """
    drafted = 0
    while drafted < len(draft.token_ids) and drafted != draft.favoured:
        if draft.parents and draft.parents[drafted] != drafted:
            break
        if draft.drafter_ids and draft.drafter_ids[drafted] != drafter_id:
            break
        drafted += 1
    return drafted, favoured_count(rows[:drafted])


def favoured_count(rows: SequenceOf[int]) -> int:
    """How many of the accepted rows are the favourite path's, which are a draft's first ones."""
    return sum([row == place for place, row in enumerate(rows, 1)])


def outcomes_by_drafter(
    draft: DraftTree, drafter_id: str, rows: SequenceOf[int]
) -> dict[str, tuple[int, list[int]]]:
    """Each drafter's number of tokens in a tree, and the places of its accepted ones in the path.

    `drafter_id` is that of all tokens if the tree names none.
    """
    found: dict[str, tuple[int, list[int]]] = {}
    owners = draft.drafter_ids or [drafter_id] * len(draft.token_ids)
    for owner in owners:
        count, places = found.get(owner, (0, []))
        found[owner] = (count + 1, places)
    for place, row in enumerate(rows):
        found[owners[row - 1]][1].append(place)
    return found
