"""Decides which drafters are asked for trees of draft tokens, and for how many tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outrider.protocol.token_tree import MAX_TREE_TOKENS
from verifier_svc.state.merged_tries import is_sampled
from verifier_svc.state.sequence import Assignment, Sequence

# Draft tokens to ask of a tree for each token of its favourite path.
_TREE_TOKENS_PER_DEPTH = 3
# Every so many steps, drafters that are asked for chains are asked for a tree.
_TREE_PROBE_STEPS = 32


def tree_tokens(
    drafts: Iterable[tuple[Sequence, Assignment, int]],
    asks: Mapping[Assignment, int],
    price: float,
    step: int,
) -> dict[Assignment, int]:
    """Draft tokens of all branches together to ask for, by assignment.

    `drafts` are (sequence, assignment, draft tokens), and `asks` the draft tokens to ask for. A
    drafter whose first guess beside its favourite is not worth its price is asked for a chain. Once
    in a while it is asked for a tree all the same, to see whether its guesses improved.
    """
    probed = step % _TREE_PROBE_STEPS == 0
    return {
        assignment: min(_TREE_TOKENS_PER_DEPTH * asks[assignment], MAX_TREE_TOKENS)
        for sequence, assignment, _ in drafts
        if wants_tree(sequence, assignment, price, probed=probed)
    }


def wants_tree(
    sequence: Sequence, assignment: Assignment, price: float, *, probed: bool = False
) -> bool:
    """Whether a guess beside the first favourite is worth its price, if a step can verify it.

    With `probed`, the guess counts as right whenever the favourite is wrong.
    """
    share = 1.0 if probed else assignment.side_rates.rescued_share
    # The first test alone decides for most sequences of a drafter of chains.
    if share < price or share * (1.0 - assignment.rate.prob_all_accepted(1)) < price:
        return False
    return not is_sampled(sequence)
