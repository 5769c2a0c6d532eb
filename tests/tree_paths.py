"""Paths in trees of draft tokens, as `outrider.protocol.token_tree` describes them."""

from __future__ import annotations

from collections.abc import Sequence


def path_to(row: int, parents: Sequence[int]) -> list[int]:
    """Return the rows from row 0's child to `row`, both included; empty for row 0."""
    found: list[int] = []
    while row > 0:
        found.append(row)
        row = parents[row - 1]
    return found[::-1]
