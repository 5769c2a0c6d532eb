"""The tree of a drafter's guesses after the committed tokens: a chain with branches beside it.

This module works with tokens alone, not with windows, messages from the verifier, models or pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.protocol.draft_messages import Proposal, SparseDistribution

# Each commit multiplies the weight of all earlier commits in the acceptance estimate by this.
_DECAY = 0.9
# On the wire a confidence is a float32 and must be above 0.
_LEAST_CONFIDENCE = 1e-6


@dataclass(eq=False, slots=True)
class _Guess:
    """A guess beside the chain. `children` maps a token to the next guess, the main guess first."""

    token: int
    confidence: float
    unsent: bool = True
    """True if this guess, or a guess that `branch` added after it, was in no proposal yet."""
    children: dict[int, _Guess] = field(default_factory=dict)

    def count(self) -> int:
        """Return the number of guesses from this guess on, itself included."""
        return 1 + sum([child.count() for child in self.children.values()])


class GuessTree:
    """Guesses in the form of a tree, in which equal prefixes merge.

    The chain is the main path. It is a plain list, because most drafts are only a chain. A place in
    the chain is given by the number of guesses before it. A confidence of 0 means that the strategy
    gave no confidence.
    """

    def __init__(self) -> None:
        self.chain: list[int] = []
        self.confidences: list[float] = []
        """The confidence of each guess of the chain."""
        self.unsent: list[SparseDistribution | None] = []
        """An entry for each guess at the chain's end that was in no proposal yet.

        The entry is the guess's distribution, or None.
        """
        self.branch_count = 0
        """The number of guesses in all branches together."""
        # The first guesses of the branches, keyed by place, then by token.
        self._branches: dict[int, dict[int, _Guess]] = {}
        self._unsent_branches = False
        # Decayed counts of the chain's guesses: those that were committed (hits), and the first
        # wrong guess of each commit (misses).
        self._hits = 0.0
        self._misses = 0.0

    @property
    def acceptance(self) -> float:
        """The estimated probability that a chain's guess is committed if all guesses before are."""
        return (self._hits + 2.0) / (self._hits + self._misses + 3.0)

    @property
    def has_unsent(self) -> bool:
        """True if a guess has not been in a proposal yet."""
        return bool(self.unsent) or self._unsent_branches

    def extend(
        self,
        run: Sequence[int],
        distributions: Sequence[SparseDistribution],
        confidences: Sequence[float],
    ) -> None:
        """Add the guesses of `run` to the chain.

        `distributions` and `confidences` are each empty, or have an entry for each guess.
        """
        self.chain += run
        self.confidences += [_valid(given) for given in confidences] or [0.0] * len(run)
        self.unsent += distributions or [None] * len(run)

    def branch(
        self, place: int, run: Sequence[int], confidences: Sequence[float], room: int
    ) -> None:
        """Add `run` after the chain's first `place` guesses; at most `room` guesses are new.

        The part of `run` that agrees with the chain or with a branch merges with it. If `run`
        agrees with the chain up to the chain's end, nothing is added. Raises IndexError if the
        chain has no guess at `place`.
        """
        first = 0
        expected = self.chain[place]
        while first < len(run) and run[first] == expected:
            first += 1
            place += 1
            if place == len(self.chain):
                return
            expected = self.chain[place]
        guesses = self._branches.get(place, {})
        path: list[_Guess] = []
        grown = False
        for i in range(first, len(run)):
            guess = guesses.get(run[i])
            if guess is None:
                if room <= 0:
                    break
                room -= 1
                grown = True
                self.branch_count += 1
                guess = guesses[run[i]] = _Guess(
                    run[i], _valid(confidences[i]) if confidences else 0.0
                )
            path.append(guess)
            guesses = guess.children
        if grown:
            self._branches.setdefault(place, {})[path[0].token] = path[0]
            self._unsent_branches = True
            for guess in path:
                guess.unsent = True

    def first_tokens(self, place: int) -> set[int]:
        """Return the tokens guessed right after the chain's first `place` guesses."""
        return {self.chain[place], *self._branches.get(place, ())}

    def has_guess_after(self, place: int, token: int) -> bool:
        """Return whether the branch that begins with `token` at `place` has further guesses."""
        guess = self._branches.get(place, {}).get(token)
        return guess is not None and bool(guess.children)

    def drop_unsent(self) -> None:
        """Drop the chain's guesses that were in no proposal, and all branches."""
        kept = len(self.chain) - len(self.unsent)
        del self.chain[kept:]
        del self.confidences[kept:]
        self.unsent = []
        self._set_branches({})

    def commit(self, new: Sequence[int]) -> int:
        """Move the root along the committed tokens `new`.

        Returns how many tokens at the beginning of `new` agree with the chain.
        """
        count = len(self.chain)
        matched = 0
        while matched < min(len(new), count) and new[matched] == self.chain[matched]:
            matched += 1
        self._hits = self._hits * _DECAY + matched
        self._misses = self._misses * _DECAY + (matched < len(new) and matched < count)
        if matched < len(new):
            self._change_to_branch(matched, new[matched:])
            return matched
        del self.chain[:matched]
        del self.confidences[:matched]
        del self.unsent[: max(0, len(self.unsent) - len(self.chain))]
        if self._branches:
            branches = self._branches.items()
            self._set_branches({at - matched: found for at, found in branches if at >= matched})
        return matched

    def _change_to_branch(self, place: int, tokens: Sequence[int]) -> None:
        """Continue with the branch that guessed these committed tokens, or with no guesses.

        The tokens were committed after the chain's first `place` guesses and differ from the chain
        there. The main path after them becomes the chain.
        """
        guesses = self._branches.get(place, {})
        for token in tokens:
            found = guesses.get(token)
            guesses = found.children if found is not None else {}
        path: list[_Guess] = []
        branches: dict[int, dict[int, _Guess]] = {}
        while guesses:
            main, *others = guesses.values()
            if others:
                branches[len(path)] = {other.token: other for other in others}
            path.append(main)
            guesses = main.children
        self.chain = [guess.token for guess in path]
        self.confidences = [guess.confidence for guess in path]
        # Wherever they are in the path, the unsent guesses count as the chain's last guesses.
        self.unsent = [None for guess in path if guess.unsent]
        self._set_branches(branches)

    def _set_branches(self, branches: dict[int, dict[int, _Guess]]) -> None:
        self._branches = branches
        firsts = [guess for found in branches.values() for guess in found.values()]
        self.branch_count = sum([guess.count() for guess in firsts])
        self._unsent_branches = any(guess.unsent for guess in firsts)

    def take(self, sequence_id: int, base_length: int) -> Proposal | None:
        """Return a proposal of the chain and of the branches' new guesses; None if nothing is new.

        The proposal repeats the chain from the root, so that it needs no earlier proposal. If only
        some guesses have a confidence, `_filled` estimates the others.
        """
        if not self.has_unsent:
            return None
        tokens = list(self.chain)
        confidences = list(self.confidences)
        count = len(tokens)
        parents: list[int] = []
        if self._unsent_branches:
            parents += range(count)
            for place, found in self._branches.items():
                _append(found, place, tokens, parents, confidences)
            self._unsent_branches = False
        distributions: list[SparseDistribution | None] = []
        if any(given is not None for given in self.unsent):
            distributions = (
                [None] * (count - len(self.unsent)) + self.unsent + [None] * (len(tokens) - count)
            )
        self.unsent = []
        confidences = _filled(confidences, parents, self.acceptance) if any(confidences) else []
        return Proposal(
            sequence_id, base_length, tokens, parents, distributions, confidences=confidences
        )


def _append(
    guesses: dict[int, _Guess],
    parent: int,
    tokens: list[int],
    parents: list[int],
    confidences: list[float],
) -> None:
    """Append the unsent guesses, and the guesses before them, to the lists of a proposal."""
    for guess in guesses.values():
        if guess.unsent:
            guess.unsent = False
            tokens.append(guess.token)
            parents.append(parent)
            confidences.append(guess.confidence)
            _append(guess.children, len(tokens), tokens, parents, confidences)


def _filled(confidences: Sequence[float], parents: Sequence[int], acceptance: float) -> list[float]:
    """Return a proposal's confidences, with estimates where the strategy gave none.

    The estimate is `acceptance` for a main guess, and half of `1 - acceptance` for a guess beside
    it.
    """
    found: list[float] = []
    known: set[int] = set()
    for given, parent in zip(confidences, parents or range(len(confidences)), strict=True):
        estimate = (1.0 - acceptance) / 2.0 if parent in known else acceptance
        found.append(given or estimate)
        known.add(parent)
    return found


def _valid(confidence: float) -> float:
    """Return the confidence, clamped to the wire's range; the least confidence for a NaN."""
    return min(max(_LEAST_CONFIDENCE, confidence), 1.0)
