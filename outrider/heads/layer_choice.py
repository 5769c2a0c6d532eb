"""Finds out by a text which layers of its target a head was trained on.

Files that look alike mean different layers: some dialects state layers, some the boundaries after
them, and heads that were converted from one to the other are often wrong by one. On the wrong
layers a head still guesses, but much worse.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.heads.model import Extension, HeadModel, HeadSequence
from outrider.heads.spec import HeadSpec
from outrider.protocol.draft_messages import FINAL_STATE

log = logging.getLogger(__name__)

# Another choice than the file's first must match this many times as often, and a few times more:
# small numbers differ by chance.
_RATIO = 1.3
_MARGIN = 3


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The boundaries that fit best, and how often each candidate's first guess was right.

    `tried` guesses were made with each. Not `clear`: another candidate is about as good, so the
    file's first was kept.
    """

    boundaries: tuple[int, ...]
    matches: Mapping[tuple[int, ...], int]
    tried: int
    clear: bool


def candidates(spec: HeadSpec) -> list[tuple[int, ...]]:
    """The boundaries that a head's file may mean, the likeliest first."""
    return [spec.boundaries, *spec.other_boundaries]


def states_of(spec: HeadSpec) -> set[int]:
    """The target's hidden states that `choose_layers` needs."""
    final = {FINAL_STATE} if spec.final_state else set()
    return final.union(*candidates(spec))


def choose_layers(
    model: HeadModel,
    text: Sequence[int],
    states: Mapping[int, torch.Tensor],
    answers: Sequence[int],
    *,
    stride: int = 2,
) -> LayerChoice:
    """Compare a head's guesses with the target's likeliest tokens, with each candidate.

    `states` has for every state of `states_of` the target's rows [T, hidden size] for the T tokens
    of `text`, some 256; `answers` [T] are the target's likeliest tokens after each. A guess is
    made after every `stride`-th token. Logs the choice, as a warning unless it is clear. The model
    needs pages for the text with each candidate, and has them all back afterwards; else it raises
    NoPages.
    """
    options = candidates(model.spec)
    final = (FINAL_STATE,) if model.spec.final_state else ()
    features = [torch.cat([states[i] for i in (*ids, *final)], dim=-1) for ids in options]
    sequences = [model.open(text[:1]) for _ in options]
    try:
        counts, tried = _count(model, sequences, features, text, answers, stride)
    finally:
        for sequence in sequences:
            model.close(sequence)
    return _decide(options, counts, tried)


def _count(
    model: HeadModel,
    sequences: Sequence[HeadSequence],
    features: Sequence[torch.Tensor],
    text: Sequence[int],
    answers: Sequence[int],
    stride: int,
) -> tuple[list[int], int]:
    """Count the right first guesses of each sequence, with its own features; and all of each."""
    counts = [0] * len(sequences)
    lengths = range(1 + stride, len(text) + 1, stride)
    for length in lengths:
        before = length - stride
        added = text[before:length]
        model.extend(
            [
                Extension(sequence, added, rows[before - 1 : length - 1], before - 1)
                for sequence, rows in zip(sequences, features, strict=True)
            ]
        )
        guesses = model.propose(sequences, 1).tokens[:, 0].tolist()
        for i, guess in enumerate(guesses):
            counts[i] += guess == answers[length - 1]
    return counts, len(lengths)


def _decide(options: list[tuple[int, ...]], counts: list[int], tried: int) -> LayerChoice:
    ranked = sorted(range(len(options)), key=lambda i: -counts[i])
    best = ranked[0]
    clear = all(_beats(counts[best], counts[other]) for other in ranked[1:2])
    chosen = options[best] if _beats(counts[best], counts[0]) else options[0]
    choice = LayerChoice(chosen, dict(zip(options, counts, strict=True)), tried, clear)
    listed = ", ".join(f"{list(ids)} {count}" for ids, count in choice.matches.items())
    text = "of %d first guesses the head was right, by the target's states: %s; it reads %s"
    log.log(
        logging.INFO if clear else logging.WARNING,
        text if clear else f"{text}, which is not clear: give --head-states if you know them",
        tried,
        listed,
        list(chosen),
    )
    return choice


def _beats(one: int, other: int) -> bool:
    return one > _RATIO * other and one - other > _MARGIN
