"""Trees of draft tokens after a sequence, as lists of parents.

Row 0 is the sequence's last token, and row i + 1 is draft token i. `parents[i]` is the row of draft
token i's parent, which comes before it. An empty list stands for a chain. `Proposal.parents` in
protos/outrider/v1/drafts.proto has the same form.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_TREE_TOKENS = 64
"""The maximum number of draft tokens of a tree with branches.

A token's ancestors are the bits of one 64-bit number.
"""


def without_chain(parents: list[int]) -> list[int]:
    """Return the parents, or an empty list if they are a chain's."""
    return [] if parents == list(range(len(parents))) else parents


def depths(parents: Sequence[int]) -> list[int]:
    """Return each draft token's distance from row 0, at least 1."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found[1:]


def ancestor_words(parents: Sequence[int]) -> list[int]:
    """Return each draft token's bitmask: bit j is set if draft token j is an ancestor or itself.

    Raises ValueError for more than MAX_TREE_TOKENS tokens, whose bits do not fit in 64 bits.
    """
    if len(parents) > MAX_TREE_TOKENS:
        raise ValueError(f"a tree has at most {MAX_TREE_TOKENS} draft tokens, not {len(parents)}")
    words = [0]
    for i, parent in enumerate(parents):
        words.append(words[parent] | 1 << i)
    return words[1:]


def children(parents: Sequence[int]) -> list[list[int]]:
    """Return the list of child rows of each row, from row 0 on."""
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for i, parent in enumerate(parents):
        found[parent].append(i + 1)
    return found


def main_path(parents: Sequence[int]) -> list[int]:
    """Return the rows of the path of first children.

    If the rows are in depth-first order, the path consists of the first rows after row 0.
    """
    found: list[int] = []
    row = 0
    for i, parent in enumerate(parents):
        if parent == row:
            row = i + 1
            found.append(row)
    return found
