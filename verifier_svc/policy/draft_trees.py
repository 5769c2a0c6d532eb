"""Chooses the chains or trees of draft tokens that a step verifies, and which trees to ask for.

A step takes the likeliest draft tokens of all its sequences, as long as each token is worth its
cost in the forward. No token is likelier than its parent, so the taken tokens form trees. No other
choice of the same number of tokens promises more accepted tokens. EAGLE-2 (arXiv 2406.16858) and
OPT-Tree (2406.17276) choose a fixed number of nodes in this order, for one sequence.

The choice depends on the tries' shapes, on confidences and on measured rates; never on which tokens
are guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from outrider.protocol.token_tree import MAX_TREE_TOKENS, children, without_chain
from verifier_svc.policy.plan import Plan
from verifier_svc.state.merged_tries import (
    MergedGuess,
    Nodes,
    guesses_after,
    is_branched,
    is_sampled,
    probs,
    roots,
)
from verifier_svc.state.sequence import Assignment, Sequence
from verifier_svc.state.trie import NO_DRAFT, DraftTree

# A drafter is asked for a tree with this many draft tokens for each token of its main path.
_TREE_TOKENS_PER_DEPTH = 3
# Every `_TREE_PROBE_STEPS` steps, drafters that are otherwise asked for chains are asked for a
# tree.
_TREE_PROBE_STEPS = 32

ChosenDraft = tuple[Assignment | None, DraftTree]
"""A draft, and the assignment that its main path comes from; None without a draft."""


def best_chain(sequence: Sequence, draft_tokens: int) -> ChosenDraft:
    """Return the ready path, cut to `draft_tokens`, that promises the most accepted tokens."""
    if draft_tokens <= 0:
        return None, NO_DRAFT
    best = _best_path(sequence, draft_tokens)
    return (None, NO_DRAFT) if best is None else (best, best.trie.path(draft_tokens))


def grow_trees(
    in_turn: Callable[[], Collection[Sequence]], plan: Plan, room: Callable[[], int]
) -> dict[int, ChosenDraft]:
    """Return the tree drafts of a step, keyed by sequence id; empty if the step has only chains.

    A sequence that is missing in the result, such as a sequence with sampled drafts, gets its best
    chain. `in_turn` returns the sequences that may have trees. `room` returns the maximum number of
    draft tokens of all sequences together.
    """
    if not plan.token_costs:
        return {}
    sequences = in_turn()
    branched = [sequence for sequence in sequences if is_branched(sequence)]
    if not any(_is_planned(sequence, plan) and not is_sampled(sequence) for sequence in branched):
        return {}
    planned = [sequence for sequence in sequences if _is_planned(sequence, plan)]
    return TreeBuilder(planned, plan).grow(room())


def _is_planned(sequence: Sequence, plan: Plan) -> bool:
    """Return whether the step verifies a draft of the sequence, if a draft is ready."""
    return sequence.num_uncomputed_tokens == 1 and plan.draft_tokens.get(sequence.id, 0) > 0


def _best_path(sequence: Sequence, draft_tokens: int) -> Assignment | None:
    """Return the assignment whose main path promises the most accepted tokens.

    Return None if no assignment has a path. The expectation comes from the path's length and its
    drafter's acceptance rate. A sampled path counts as complete, see `Assignment.ready_tokens`.
    """
    best: Assignment | None = None
    most = 0.0
    for assignment in sequence.assignments.values():
        length = assignment.ready_tokens(draft_tokens)
        if length and (expected := assignment.rate.expected_tokens(length)) > most:
            best = assignment
            most = expected
    return best


@dataclass(eq=False, slots=True)
class _Tree:
    """The tree of one sequence while it grows. Its rows are in the order in which they were taken.

    With `fixed`, the tree takes as many tokens as it may have, whatever they cost.
    """

    assignment: Assignment
    depth: int
    """The maximum number of tokens of a path."""
    most: int
    """The maximum number of tokens in all."""
    fixed: bool
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    drafter_ids: list[str] = field(default_factory=list)

    def take(self, parent: int, guess: MergedGuess) -> int:
        """Add a guess below the row `parent`; return its row."""
        self.token_ids.append(guess.token)
        self.parents.append(parent)
        self.drafter_ids.append(guess.assignment.drafter.id)
        return len(self.token_ids)

    def draft(self) -> ChosenDraft:
        """Return the draft of the taken tokens, depth-first, main guesses before their siblings."""
        if not self.token_ids:
            return None, NO_DRAFT
        below = children(self.parents)
        draft = DraftTree([], [])
        pending = [(row, 0) for row in reversed(below[0])]
        while pending:
            row, parent = pending.pop()
            draft.token_ids.append(self.token_ids[row - 1])
            draft.parents.append(parent)
            draft.drafter_ids.append(self.drafter_ids[row - 1])
            here = len(draft.token_ids)
            pending += [(child, here) for child in reversed(below[row])]
        draft.parents = without_chain(draft.parents)
        if all(each == self.assignment.drafter.id for each in draft.drafter_ids):
            draft.drafter_ids = []
        return self.assignment, draft


class TreeBuilder:
    """The trees of a step's sequences while they grow."""

    def __init__(self, planned: Collection[Sequence], plan: Plan) -> None:
        self._costs = plan.token_costs
        self._cost_index = 0
        self._taken = 0
        # Guesses that may be taken next, the likeliest first: (minus its cumulative acceptance, a
        # number that orders equally likely guesses, its tree, its parent's row, its depth, the
        # guess).
        self._next: list[tuple[float, int, _Tree, int, int, MergedGuess]] = []
        self._offered = 0
        self._trees: dict[int, _Tree] = {}
        for sequence in planned:
            depth = plan.draft_tokens[sequence.id]
            best = _best_path(sequence, depth)
            if best is None:
                continue
            if is_sampled(sequence):
                self._taken += min(len(best.trie.main_path), depth)
                continue
            nodes = roots(sequence, best)
            fixed = True
            if plan.fixed or sequence.request.speculation.draft_tokens is not None:
                most = depth
            elif plan.policy.most_tokens:
                # Each drafter gets room for its tokens, so that no drafter displaces another
                # drafter's tokens.
                most = min(depth * len(nodes), MAX_TREE_TOKENS)
            else:
                most = MAX_TREE_TOKENS
                fixed = False
            tree = self._trees[sequence.id] = _Tree(best, depth, most, fixed)
            self._offer(tree, 0, 0, 1.0, nodes)

    def grow(self, room: int) -> dict[int, ChosenDraft]:
        """Take the guesses that are worth their cost; return the drafts, keyed by sequence id.

        All drafts together take at most `room` tokens, the likeliest of all sequences.
        """
        while self._next and self._taken < room:
            key, _, tree, parent, depth, guess = heappop(self._next)
            if len(tree.token_ids) < tree.most and (tree.fixed or -key >= self._token_cost()):
                self._taken += 1
                row = tree.take(parent, guess)
                self._offer(tree, row, depth, -key, guess.nodes)
        return {sequence_id: tree.draft() for sequence_id, tree in self._trees.items()}

    def _offer(self, tree: _Tree, row: int, depth: int, cumulative: float, nodes: Nodes) -> None:
        """Add the guesses after a row of this depth and cumulative acceptance as candidates."""
        if depth == tree.depth:
            return
        guesses = guesses_after(nodes)
        if not guesses:
            return
        # A guess that costs too much now is dropped: it becomes no cheaper later.
        threshold = 0.0 if tree.fixed else self._token_cost()
        for guess, prob in zip(guesses, probs(guesses, depth), strict=True):
            if cumulative * prob >= threshold:
                self._offered += 1
                offer = (-cumulative * prob, self._offered, tree, row, depth + 1, guess)
                heappush(self._next, offer)

    def _token_cost(self) -> float:
        """Return how many committed tokens the next draft token costs.

        The cost rises with the number of tokens taken.
        """
        last = len(self._costs) - 1
        while self._cost_index < last and self._taken >= self._costs[self._cost_index][0]:
            self._cost_index += 1
        return self._costs[self._cost_index][1]


def tree_tokens(
    drafts: Iterable[tuple[Sequence, Assignment, int]],
    asks: Mapping[Assignment, int],
    threshold: float,
    step: int,
) -> dict[Assignment, int]:
    """Return how many draft tokens to ask for, branches included, keyed by assignment.

    `drafts` are (sequence, assignment, draft tokens). `asks` says how many draft tokens of one path
    to ask for. A drafter is asked for a chain if siblings of its main guesses are not worth their
    cost. From time to time such a drafter is asked for a tree, to see whether its siblings
    improved.
    """
    probed = step % _TREE_PROBE_STEPS == 0
    return {
        assignment: min(_TREE_TOKENS_PER_DEPTH * asks[assignment], MAX_TREE_TOKENS)
        for sequence, assignment, _ in drafts
        if wants_tree(sequence, assignment, threshold, probed=probed)
    }


def wants_tree(
    sequence: Sequence, assignment: Assignment, threshold: float, *, probed: bool = False
) -> bool:
    """Return whether a sibling of the first main guess is worth its cost, if a step can verify it.

    With `probed`, the estimate assumes that the sibling is right whenever the main guess is wrong.
    """
    share = 1.0 if probed else assignment.sibling_rates.rescued_share
    # If the drafter proposes only chains, the first comparison mostly decides.
    if share < threshold or share * (1.0 - assignment.rate.prob_all_accepted(1)) < threshold:
        return False
    return not is_sampled(sequence)
