"""The truth of a simulation: the text of each request, how hard it is, and which tokens each drafter would guess.

Every draw comes from a generator that is named by seed, drafter and text, and stands for one position of that text. So nothing
depends on the order in which things happen, and two ways of decoding meet the same luck.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

VOCAB = 256
# Recorded prompts begin with a token from here on, which tells the text and is no model's.
FIRST_MARK = 2**31
# Recorded guesses: the true token, or none. All else is a wrong token.
RIGHT, NO_GUESS = "+", "."
_CHUNK = 128


@dataclass(eq=False, slots=True)
class Text:
    """The target's text for one request. `number` is the first token of its prompt too, so that a sequence tells its text."""

    number: int
    kind: str
    prompt_length: int
    output_length: int
    guesses: Mapping[str, str] = field(default_factory=dict)
    """Recorded guesses by drafter, one character for each token of the output, as in a recording."""
    tokens: list[int] = field(default_factory=list)
    """The text behind the prompt."""
    hard: list[bool] = field(default_factory=list)
    """Whether each of `tokens` lies in a hard stretch."""
    prompt_ids: list[int] = field(default_factory=list)
    """The prompt's tokens where they were recorded. The first one gives way to `number`."""

    @property
    def prompt(self) -> list[int]:
        return [self.number, *(self.prompt_ids[1:] or [0] * (self.prompt_length - 1))]


class World:
    """The texts of one simulation and the drafters' luck with them."""

    def __init__(self, seed: int, hard_share: float = 0.0, stretch_tokens: float = 32.0) -> None:
        """Hard stretches are `hard_share` of each text and last for `stretch_tokens` tokens on average."""
        self._seed = seed
        self._hard_share = hard_share
        self._stretch_tokens = stretch_tokens
        self._texts: dict[int, Text] = {}
        self._writers: dict[int, Random] = {}
        self._draws: dict[tuple[str, int], tuple[Random, list[float]]] = {}

    def random(self, *names: object) -> Random:
        """A generator of its own for these names."""
        return Random("/".join(map(str, (self._seed, *names))))

    def add(self, text: Text) -> None:
        self._texts[text.number] = text
        self._writers[text.number] = self.random("text", text.number)

    def text_of(self, tokens: list[int], ahead: int) -> Text:
        """The text that these tokens, prompt first, are the beginning of; written for at least `ahead` tokens more."""
        text = self._texts[tokens[0]]
        while len(text.tokens) < len(tokens) - text.prompt_length + ahead:
            self._write(text)
        return text

    def _write(self, text: Text) -> None:
        draw = self._writers[text.number]
        text.tokens += draw.choices(range(VOCAB), k=_CHUNK)
        share, stretch = self._hard_share, self._stretch_tokens
        if share <= 0.0:
            text.hard += [False] * _CHUNK
            return
        for _ in range(_CHUNK):
            # A Markov chain of two states: it is left so often that hard stretches last and are as frequent as they should.
            now = text.hard[-1] if text.hard else draw.random() < share
            leave = 1.0 / stretch if now else share / max(1.0 - share, 1e-9) / stretch
            text.hard.append(now != (draw.random() < leave))

    def luck(self, drafter: str, text: Text, index: int) -> float:
        """A number from 0 to 1: the drafter knows the token at `index` behind the prompt if its acceptance there is greater."""
        found = self._draws.get((drafter, text.number))
        if found is None:
            found = self._draws[drafter, text.number] = (
                self.random("drafter", drafter, text.number),
                [],
            )
        draw, numbers = found
        while len(numbers) <= index:
            numbers += [draw.random() for _ in range(_CHUNK)]
        return numbers[index]
