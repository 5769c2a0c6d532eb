"""Finds out what the ambiguous files of a head mean: tries each interpretation on a text.

Files that look alike mean different layers: some dialects state layers, some the auxiliary layers
after them, and heads that were converted from one to the other are often wrong by one layer. Some
keys mean one thing to the code that trained a head and another to the code that serves it. A head
whose file is interpreted wrongly still guesses, but much worse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from outrider.heads.model import Extension, HeadModel, Place, Rank
from outrider.heads.spec import HeadSpec
from outrider.protocol.draft_messages import FINAL_STATE

log = logging.getLogger(__name__)

# The interpretation that is likeliest from the file alone is kept, unless another has more than
# `_RATIO` times its right guesses, and more than `_MARGIN` more. Small numbers differ by chance.
_RATIO = 1.3
_MARGIN = 3
# The number of guesses in a row. The guesses after the first show how a head recycles its states.
_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class Matches:
    """The number of right guesses of an interpretation.

    `later` counts the guesses after the first, which were made from the head's own states. `later`
    is 0 where all interpretations recycle the states in the same way.
    """

    spec: HeadSpec
    first: int
    later: int


@dataclass(frozen=True, slots=True)
class ReadingChoice:
    """The chosen interpretation, and each one's number of right guesses, the likeliest first.

    With each interpretation, `tried` first guesses were made. If the choice is not `clear`, another
    interpretation has about as many right guesses as the best. The interpretation that is likeliest
    from the file alone was kept, unless the best has clearly more right guesses.
    """

    spec: HeadSpec
    matches: list[Matches]
    tried: int
    clear: bool

    @property
    def shown(self) -> list[str]:
        """A description of each interpretation, with its differences from the others."""
        return [
            described(found.spec, [each.spec for each in self.matches]) for found in self.matches
        ]


def states_of(spec: HeadSpec) -> set[int]:
    """Return the target's hidden states that `choose_reading` needs."""
    final = {FINAL_STATE} if spec.final_state else set()
    return final.union(spec.aux_layers, *spec.other_aux_layers)


def described(spec: HeadSpec, among: Sequence[HeadSpec]) -> str:
    """Describe the interpretation `spec` by its states and its special properties.

    Other properties than the states are included only if they differ between the interpretations
    in `among`.
    """
    words = [f"states {list(spec.aux_layers)}" if spec.aux_layers else "the final state"]
    if len({each.scores_normed for each in among}) > 1:
        words.append("scores after the norm" if spec.scores_normed else "scores without the norm")
    if len({each.recycle_normed for each in among}) > 1:
        words.append(
            "recycled after the norm" if spec.recycle_normed else "recycled before the norm"
        )
    rotary_sizes = {each.decoder.rotary_size for each in among if each.decoder is not None}
    if len(rotary_sizes) > 1 and spec.decoder is not None:
        count = spec.decoder.rotary_size or spec.decoder.head_size
        words.append(f"{count} channels rotated")
    return ", ".join(words)


def choose_reading(
    model: HeadModel,
    text: Sequence[int],
    states: Mapping[int, torch.Tensor],
    answers: Sequence[int],
    *,
    stride: int = 2,
) -> ReadingChoice:
    """Compare the guesses of each interpretation of a head with the target's likeliest tokens.

    `text` has T tokens, about 256. `states` maps each state of `states_of` to the target's rows [T,
    hidden size]. `answers` [T] has the target's likeliest token after each token. A guess is made
    after every `stride`-th token. Logs the choice, as a warning if the choice is not clear. For
    each set of auxiliary layers, the model needs pages for one copy of the text, else it raises
    NoPages. Afterwards these pages are free, and the model uses its previous interpretation.
    """
    before = model.spec
    options = before.readings
    recycles = len({option.recycle_normed for option in options}) > 1
    lengths = range(1 + stride, len(text) + 1 - (_IN_A_ROW if recycles else 0), stride)
    trial = _Trial(model, text, states, answers, lengths, _IN_A_ROW if recycles else 1)
    found: list[Matches] = []
    try:
        together = 1 + len(before.other_aux_layers)
        for i in range(0, len(options), together):
            found += trial.count(options[i : i + together])
    finally:
        model.read_as(before)
    return _decide(found, len(lengths))


@dataclass(frozen=True, slots=True)
class _Trial:
    """A text, and the places in it after which `steps` tokens are guessed."""

    model: HeadModel
    text: Sequence[int]
    states: Mapping[int, torch.Tensor]
    answers: Sequence[int]
    lengths: range
    steps: int

    def count(self, options: Sequence[HeadSpec]) -> list[Matches]:
        """Count how many guesses are right with each interpretation in `options`.

        The interpretations may differ only in their auxiliary layers.
        """
        model, text = self.model, self.text
        model.read_as(options[0])
        final = (FINAL_STATE,) if options[0].final_state else ()
        features = [
            torch.cat([self.states[i] for i in (*each.aux_layers, *final)], dim=-1)
            for each in options
        ]
        counts = [[0] * self.steps for _ in options]
        sequences = [model.open(text[:1]) for _ in options]
        try:
            known = 1
            for length in self.lengths:
                added = text[known:length]
                news = [
                    Extension(sequence, added, rows[known - 1 : length - 1], known - 1)
                    for sequence, rows in zip(sequences, features, strict=True)
                ]
                known = length
                model.extend(news)
                model.propose(sequences, self.steps, rank=self._rank(length, counts))
        finally:
            for sequence in sequences:
                model.close(sequence)
        return [
            Matches(spec, first, sum(later))
            for spec, (first, *later) in zip(options, counts, strict=True)
        ]

    def _rank(self, length: int, counts: list[list[int]]) -> Rank:
        """Return a `Rank` that counts right guesses after `length` tokens.

        The `Rank` ignores the guesses and chooses the text's own tokens.
        """

        def rank(
            places: Sequence[Place], scores_RV: torch.Tensor, width: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            guesses = scores_RV.argmax(-1).tolist()
            tokens = []
            for (i, run), guess in zip(places, guesses, strict=True):
                at = length + len(run)
                counts[i][len(run)] += guess == self.answers[at - 1]
                tokens.append([self.text[at] if at < len(self.text) else guess])
            chosen = torch.tensor(tokens, device=scores_RV.device)
            return chosen, torch.ones_like(chosen, dtype=torch.float32)

        return rank


def _decide(found: list[Matches], tried: int) -> ReadingChoice:
    """Choose by the first guesses, and between interpretations alike in these by later guesses."""
    best, clear = _best(found, [each.first for each in found], _first_guess)
    alike = [each for each in found if _first_guess(each) == _first_guess(best)]
    if len(alike) > 1:
        best, is_clear = _best(alike, [each.later for each in alike], lambda each: each.spec)
        clear = clear and is_clear
    choice = ReadingChoice(best.spec, found, tried, clear)
    listed = "; ".join(
        f"{words}: {each.first}" + (f" and {each.later} later" if each.later else "")
        for words, each in zip(choice.shown, found, strict=True)
    )
    text = "right out of %d first guesses, by what the head's file may mean: %s; it reads %s"
    log.log(
        logging.INFO if clear else logging.WARNING,
        text if clear else f"{text}, which is not clear: set it with --head-reading if you know it",
        tried,
        listed,
        choice.shown[found.index(best)],
    )
    return choice


def _first_guess(found: Matches) -> HeadSpec:
    """Return an interpretation without its recycling of states, which affects no first guess."""
    return replace(found.spec, recycle_normed=False)


def _best(
    found: Sequence[Matches], counts: Sequence[int], kind: Callable[[Matches], HeadSpec]
) -> tuple[Matches, bool]:
    """Return the interpretation with the most right guesses, or the first if it is about as good.

    Also return whether the choice is clear, compared with the best interpretation of another kind.
    """
    top = max(range(len(found)), key=lambda i: (counts[i], -i))
    others = [n for n, each in zip(counts, found, strict=True) if kind(each) != kind(found[top])]
    clear = not others or _beats(counts[top], max(others))
    return found[top if _beats(counts[top], counts[0]) else 0], clear


def _beats(one: int, other: int) -> bool:
    return one > _RATIO * other and one - other > _MARGIN
