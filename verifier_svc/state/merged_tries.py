"""The tries of all drafters of one sequence as one trie, in which equal prefixes merge.

The trie whose main path is to be verified comes first. Its main guesses are also the main guesses
of the merged trie. The main guess of a later trie becomes the merged trie's main guess only where
the tries before it have no guess.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.protocol.messages import DraftDistribution
from verifier_svc.state.sequence import Assignment, Sequence
from verifier_svc.state.trie import Node

Nodes = list[tuple[Assignment, Node]]
"""The nodes of one prefix in the tries that have it."""

# A sibling of a drafter's main guess counts as half as likely as the sibling before it.
_NEXT_GUESS = 0.5


class MergedGuess(NamedTuple):
    """A token that may follow a prefix."""

    token: int
    assignment: Assignment
    """The first assignment whose trie has the token."""
    rank: int
    """The guess's place among that trie's guesses after the prefix, from 0."""
    confidence: float
    nodes: Nodes


def is_branched(sequence: Sequence) -> bool:
    """Return whether the sequence's tries together may be more than a chain."""
    found = False
    for assignment in sequence.assignments.values():
        trie = assignment.trie
        if trie.node_count:
            if found or not trie.is_chain:
                return True
            found = True
    return False


def is_sampled(sequence: Sequence) -> bool:
    """Return whether one of the sequence's drafters samples its drafts.

    The rules for sampled drafts verify only chains.
    """
    assignments = sequence.assignments.values()
    return any(each.distribution is DraftDistribution.SPARSE for each in assignments)


def roots(sequence: Sequence, first: Assignment) -> Nodes:
    """Return the root of each trie that has guesses.

    The trie of `first` comes first.
    """
    others = [each for each in sequence.assignments.values() if each is not first]
    return [(each, each.trie.root) for each in (first, *others) if each.trie.node_count]


def guesses_after(nodes: Nodes) -> list[MergedGuess]:
    """Return the tokens that may follow a prefix; the main guess is the first."""
    if len(nodes) == 1:
        [(assignment, node)] = nodes
        return [
            MergedGuess(child.token, assignment, rank, child.confidence, [(assignment, child)])
            for rank, child in enumerate(node.children.values())
        ]
    found: dict[int, MergedGuess] = {}
    for assignment, node in nodes:
        for rank, child in enumerate(node.children.values()):
            guess = found.get(child.token)
            if guess is None:
                below = [(assignment, child)]
                found[child.token] = MergedGuess(
                    child.token, assignment, rank, child.confidence, below
                )
            else:
                guess.nodes.append((assignment, child))
    return list(found.values())


def probs(guesses: list[MergedGuess], depth: int) -> list[float]:
    """Return the probability of each of `guesses`, which follow a prefix of `depth` right guesses.

    The main guess has its drafter's acceptance rate. No other guess gets a higher probability, so
    that a tree takes the main guess first.
    """
    main_rate = _rate(guesses[0].assignment, depth)
    found = [main_rate]
    for guess in guesses[1:]:
        claim = _claim(guess, depth, main_rate)
        estimate = guess.assignment.sibling_rates.estimate(depth, guess.rank, claim)
        found.append(min(estimate, main_rate))
    return found


def observe_siblings(
    sequence: Sequence, first: Assignment, committed: list[int], threshold: float
) -> None:
    """Measure how often siblings of the main guesses are right, given newly committed tokens.

    Call it before the tries' roots move. Guesses that no step verified count as well, so the
    measurements do not depend on what was verified. A wrong main guess of the assignment `first`
    counts as rescued only if another guess of this assignment was right and had an estimated
    cumulative acceptance of at least `threshold`.
    """
    nodes = roots(sequence, first)
    on_main_path = True
    cumulative = 1.0
    for depth, token in enumerate(committed):
        guesses = guesses_after(nodes)
        if not guesses:
            return
        main_rate = _rate(guesses[0].assignment, depth)
        on_main_path = on_main_path and guesses[0].assignment is first
        rescued = False
        nodes = []
        for place, guess in enumerate(guesses):
            right = guess.token == token
            if right:
                nodes = guess.nodes
            if place:
                claim = _claim(guess, depth, main_rate)
                rates = guess.assignment.sibling_rates
                if right and guess.assignment is first:
                    prob = min(rates.estimate(depth, guess.rank, claim), main_rate)
                    rescued = cumulative * prob >= threshold
                rates.observe(depth, guess.rank, claim, right)
        cumulative *= main_rate
        if on_main_path and token != guesses[0].token:
            first.sibling_rates.observe_wrong(rescued)
            on_main_path = False


def _claim(guess: MergedGuess, depth: int, main_rate: float) -> float:
    """Return the probability of a sibling of the main guess, before it is corrected."""
    if guess.confidence > 0.0:
        return guess.confidence
    if guess.rank == 0:
        return (1.0 - main_rate) * _rate(guess.assignment, depth)
    return (1.0 - main_rate) * _NEXT_GUESS**guess.rank


def _rate(assignment: Assignment, depth: int) -> float:
    """Return the acceptance rate of a drafter's main guess after `depth` accepted guesses."""
    rates = assignment.rate.by_position
    return rates[depth] if depth < len(rates) else rates[-1]
