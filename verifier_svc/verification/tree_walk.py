"""Walks a tree of draft tokens to the last token that the target accepts.

Under exact rules, the token after a row is the target's own, whatever the tree holds. The tree then
only decides how many of these tokens one forward finds. Rows and parents are as in
`protocol.token_tree`.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.protocol.token_tree import children


def walk(
    token_ids: Sequence[int],
    parents: Sequence[int],
    own: Sequence[int],
    accepts_first: Sequence[bool] = (),
) -> list[int]:
    """Return the rows of the accepted draft tokens, in order.

    `own` has the target's own token after each row; a negative number equals no draft token.
    `accepts_first` says for each row whether a rule accepts its first child, whatever the target's
    own token is. At a row whose first child no rule accepts, the walk goes to the child that equals
    the target's own token, and stops if there is none.
    """
    below = children(parents)
    rows: list[int] = []
    row = 0
    while below[row]:
        following = 0
        if accepts_first and accepts_first[row]:
            following = below[row][0]
        else:
            for child in below[row]:
                if token_ids[child - 1] == own[row]:
                    following = child
                    break
        if following == 0:
            break
        rows.append(following)
        row = following
    return rows


def first_children(parents: Sequence[int]) -> list[tuple[int, int]]:
    """Return the rows that have children, each with its first child's row."""
    return [(row, below[0]) for row, below in enumerate(children(parents)) if below]


def is_leaf(row: int, count: int, parents: Sequence[int]) -> bool:
    """True if no draft token follows `row`, in a tree or chain of `count` draft tokens."""
    if not parents:
        return row == count
    return row not in parents
