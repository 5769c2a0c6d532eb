"""What became of a verified tree: of its favourite path, and of each drafter's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from verifier_svc.state.draft_tree import DraftTree


def favourite_outcome(draft: DraftTree, drafter_id: str, rows: Sequence[int]) -> tuple[int, int]:
    """The length of a drafter's own favourite path in a tree, and how much of it was accepted.

    The path ends where another drafter's guess continues it. `rows` are the accepted ones.
    """
    drafted = 0
    while drafted < len(draft.token_ids):
        if draft.parents and draft.parents[drafted] != drafted:
            break
        if draft.drafter_ids and draft.drafter_ids[drafted] != drafter_id:
            break
        drafted += 1
    return drafted, favoured_count(rows[:drafted])


def favoured_count(rows: Sequence[int]) -> int:
    """How many of the accepted rows are the favourite path's, which are a draft's first ones."""
    return sum([row == place for place, row in enumerate(rows, 1)])


def outcomes_by_drafter(
    draft: DraftTree, drafter_id: str, rows: Sequence[int]
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
