"""A simulation's ground truth: texts, their hard stretches, and which tokens drafters know.

Each draw comes from a generator named by seed, drafter and text, and belongs to one position of
that text. So no draw depends on the order of events, and plain and drafted decoding get equal
draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from outrider.grammar.kinds import Grammar

if TYPE_CHECKING:
    from drafter_svc.families.head_worker import Offer

VOCAB = 256
# Recorded prompts begin with a token of at least this number, which identifies the text. No model
# has such tokens.
FIRST_MARK = 2**31
# Characters of recorded guesses: for a right guess, and for no guess. All others stand for wrong
# guesses.
RIGHT = "+"
NO_GUESS = "."
_CHUNK = 128
# The mean length of a hard stretch.
_STRETCH_TOKENS = 32.0


@dataclass(eq=False, slots=True)
class DrawnText:
    """The target's text for one request.

    `number` is also the first token of the prompt, so that a sequence identifies its text.
    """

    number: int
    kind: str
    prompt_length: int
    output_length: int
    guesses: Mapping[str, str] = field(default_factory=dict)
    """Recorded guesses, keyed by drafter, with a character per output token as in a recording."""
    tokens: list[int] = field(default_factory=list)
    """The text after the prompt."""
    hard: list[bool] = field(default_factory=list)
    """For each of `tokens`, True if it lies in a hard stretch."""
    tenant: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    """The prompt's tokens if they were recorded. `number` replaces the first token."""
    reads: bool = True
    """True if the client reads the answer."""
    grammar: Grammar | None = None
    """The request's grammar. It has no effect on the text."""

    @property
    def prompt(self) -> list[int]:
        """The prompt's tokens, `number` first. Tokens that were not recorded are zeros."""
        return [self.number, *(self.prompt_ids[1:] or [0] * (self.prompt_length - 1))]


class World:
    """The texts of one simulation, and the draws that decide which tokens the drafters know.

    Hard stretches are `hard_share` of each text and have 32 tokens on average.
    """

    def __init__(self, seed: int, hard_share: float = 0.0) -> None:
        self.offers: Mapping[tuple[int, ...], Mapping[str, Sequence[Offer]]] = {}
        """The offers of a head after the prompt and after each token of the output, keyed by
        recorded prompt and by drafter."""
        self._seed = seed
        self._hard_share = hard_share
        self._texts: dict[int, DrawnText] = {}
        self._writers: dict[int, Random] = {}
        self._draws: dict[tuple[str, int], tuple[Random, list[float]]] = {}

    def random(self, *names: object) -> Random:
        """Return a generator for these names; equal names give equal draws."""
        return Random("/".join(map(str, (self._seed, *names))))

    def add(self, text: DrawnText) -> None:
        """Add a request's text."""
        self._texts[text.number] = text
        self._writers[text.number] = self.random("text", text.number)

    def text_of(self, tokens: list[int], ahead: int) -> DrawnText:
        """Return the text that begins with `tokens`; it has at least `ahead` more tokens."""
        text = self._texts[tokens[0]]
        while len(text.tokens) < len(tokens) - text.prompt_length + ahead:
            self._write(text)
        return text

    def _write(self, text: DrawnText) -> None:
        draw = self._writers[text.number]
        text.tokens += draw.choices(range(VOCAB), k=_CHUNK)
        share = self._hard_share
        if share <= 0.0:
            text.hard += [False] * _CHUNK
            return
        # A Markov chain of two states whose exit probabilities give the wanted length and share.
        leave_hard = 1.0 / _STRETCH_TOKENS
        leave_easy = share / max(1.0 - share, 1e-9) / _STRETCH_TOKENS
        for _ in range(_CHUNK):
            is_hard = text.hard[-1] if text.hard else draw.random() < share
            leave = leave_hard if is_hard else leave_easy
            text.hard.append(is_hard != (draw.random() < leave))

    def luck(self, drafter: str, text: DrawnText, index: int) -> float:
        """Return the drafter's draw in [0, 1) for the token at `index` after the prompt.

        The drafter knows the token if its acceptance there is greater than the draw.
        """
        key = (drafter, text.number)
        found = self._draws.get(key)
        if found is None:
            found = (self.random("drafter", *key), [])
            self._draws[key] = found
        draw, numbers = found
        while len(numbers) <= index:
            numbers += [draw.random() for _ in range(_CHUNK)]
        return numbers[index]
