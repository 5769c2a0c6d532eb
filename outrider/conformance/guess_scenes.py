"""Scenes that check guesses: the branches of trees, and guesses where a text repeats itself."""

from __future__ import annotations

from itertools import pairwise

from outrider.conformance.ledger import TrackedSequence
from outrider.conformance.scripted_verifier import Broken
from outrider.conformance.stage import TEXT, Stage, begin, go_on, opened, settled
from outrider.v1 import drafts_pb2

_TREE_TOKENS = 24
# In `_FORK`, the continuations `_ONE` and `_OTHER` follow `_CONTEXT` in turn. The three lists have
# no token in common.
_CONTEXT = [51, 52, 53]
_ONE = [*range(60, 68)]
_OTHER = [*range(80, 88)]
# The last token, 99, occurs nowhere else. So if the context follows `_FORK`, the longest match for
# the end of that text is the context.
_FORK = [*[*_CONTEXT, *_ONE, *_CONTEXT, *_OTHER] * 2, 99]
# Maps each token, except 99 and the context's first token, to the only token that comes before it.
_BEFORE = {
    token: before
    for line in ([*_CONTEXT, *_ONE], [_CONTEXT[-1], *_OTHER])
    for before, token in pairwise(line)
}


async def trees(stage: Stage) -> None:
    """Ask for trees where a sequence has two known continuations, and check the trees."""
    link = await stage.link()
    # The first sequence ends with the whole context, the second without the context's last token.
    for end in (3, 2):
        asked = opened([*_FORK, *_CONTEXT[:end]], tree_tokens=_TREE_TOKENS)
        known = await begin(link, asked, "answers-opened")
        await settled(stage, link, known)
        # Commit the beginning of `_ONE`. A chain would guess `_OTHER`, which followed the context
        # the last time.
        committed = [*_CONTEXT[end:], *_ONE[:2]]
        await go_on(link, known, "answers-verdicts", committed, tree_tokens=_TREE_TOKENS)
        await settled(stage, link, known)
        _check_trees(stage, known)
        link.step(closed=[drafts_pb2.Closed(sequence_id=known.opened.sequence_id)])


def _check_trees(stage: Stage, known: TrackedSequence) -> None:
    """Compare the parents of branches with the tokens that come before the branches in the text.

    Looks only at tokens whose parent is not the token sent just before, since a chain does not show
    how the drafter counts parents. A model may guess anything, so tokens that are not in the
    sequence are no fault. Misplaced tokens are a fault only if there are more of them than of
    well-placed tokens.
    """
    right = 0
    odd: list[str] = []
    for base_length, tokens, parents in known.trees:
        base = known.committed[base_length - 1]
        for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            before = _BEFORE.get(token)
            found = tokens[parent - 1] if parent else base
            if parent == i or before is None or found not in _FORK:
                continue
            right += found == before
            if found != before:
                odd.append(_misplaced(token, found, before))
    if len(odd) > right:
        raise Broken("trees", odd[0])
    if right:
        stage.passed("trees")


def _misplaced(token: int, found: int, before: int) -> str:
    """Return the message about a guessed token that has the wrong parent."""
    text = f"your branch has {token} after {found}, where the text has it after {before}"
    if _BEFORE.get(before) == found:
        return (
            f"{text}: one too shallow. Are parents counted from 0? "
            "0 is the base, and j is token_ids[j - 1]"
        )
    if _BEFORE.get(found) == before:
        return f"{text}: one too deep. 0 is the base, and j is token_ids[j - 1]"
    return text


async def repeating(stage: Stage) -> None:
    """Commit tokens that repeat, whatever the drafter guesses; remark if no guess was right."""
    link = await stage.link()
    known = await begin(link, opened(), "answers-opened")
    guessed = right = 0
    for i in range(12):
        if i < 2:
            await settled(stage, link, known)
        first = known.valid_guess()[:1]
        token = TEXT[i % len(TEXT)]
        guessed += len(known.paths) > 0
        right += first == [token]
        await go_on(link, known, "answers-verdicts", [token])
    if guessed and not right:
        text = f"none of {len(known.paths)} guesses came true where the text repeats itself"
        stage.remark("useless-guesses", text)
    link.step(closed=[drafts_pb2.Closed(sequence_id=known.opened.sequence_id)])
