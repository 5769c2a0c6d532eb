"""The exact distribution of a small target in every sampling setting, by transformers' code."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import SamplingParams, SpeculationOptions
from tests.losslessness.chi_square import Comparison, compare
from tests.losslessness.guesser import Guesser
from tests.losslessness.small import NextProbs, Probs, Text
from tests.losslessness.traffic import Traffic

VOCAB = 16
LENGTH = 3
PROMPT = (3, 5, 7, 5)
END = 9


@cache
def logits(text: Text) -> torch.Tensor:
    """Return different random logits after each text, [VOCAB]; a few tokens are likely."""
    rng = np.random.default_rng(zlib.crc32(bytes(text)))
    return torch.from_numpy(rng.normal(size=VOCAB) * 2.5).float()


def traffic(sampling: SamplingParams, **more: Any) -> Traffic:
    """Return traffic with 256 requests at a time.

    The tests compare the first three tokens after the prompt.
    """
    return Traffic(
        logits=logits,
        prompts=(PROMPT,),
        policy=DraftTokensPolicy("fixed", 5),
        length=9,
        concurrent=256,
        page_count=4096,
        sampling=sampling,
        speculation=SpeculationOptions(draft_tokens=5),
        stop_token=END if sampling.min_tokens else None,
        enough=LENGTH,
        **more,
    )


def generate(
    sampling: SamplingParams, draws: int, *drafters: Guesser, **more: Any
) -> npt.NDArray[np.int64]:
    """Return the first three tokens of `draws` requests, [draws, 3]; `more` is for `Traffic`."""
    return traffic(sampling, **more).run(draws, *drafters)


@cache
def exact_probs(sampling: SamplingParams) -> dict[Text, Probs]:
    """Map each text of up to two tokens to transformers' distribution of the next token."""
    probs: dict[Text, Probs] = {}
    for length in range(LENGTH):
        texts = list(itertools.product(range(VOCAB), repeat=length))
        ids = torch.tensor([[*PROMPT, *text] for text in texts])
        rows = torch.stack([logits((*PROMPT, *text)) for text in texts])
        scores = processors(sampling)(ids, rows)
        for text, row in zip(texts, scores, strict=True):
            probs[text] = row.double().softmax(-1).numpy()
    return probs


class _OutputPenalties:
    """OpenAI's presence and frequency penalties, which transformers lacks."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generated = [row[len(PROMPT) :] for row in input_ids]
        counts = torch.stack([torch.bincount(row, minlength=VOCAB) for row in generated])
        return scores - self._presence * (counts > 0) - self._frequency * counts


def processors(s: SamplingParams) -> LogitsProcessorList:
    """Return transformers' processors for the settings, in transformers' order."""
    return LogitsProcessorList([*_penalties(s), *_warpers(s)])


def _penalties(s: SamplingParams) -> Iterator[Callable[..., torch.Tensor]]:
    if s.logit_bias:
        yield SequenceBiasLogitsProcessor([[[token], value] for token, value in s.logit_bias])
    if s.repetition_penalty != 1:
        yield RepetitionPenaltyLogitsProcessor(s.repetition_penalty)
    if s.presence_penalty or s.frequency_penalty:
        yield _OutputPenalties(s.presence_penalty, s.frequency_penalty)
    if s.banned_token_ids:
        yield SuppressTokensLogitsProcessor(list(s.banned_token_ids))
    if s.min_tokens:
        yield MinNewTokensLengthLogitsProcessor(len(PROMPT), s.min_tokens, [END])


def _warpers(s: SamplingParams) -> Iterator[Callable[..., torch.Tensor]]:
    if s.temperature != 1:
        yield TemperatureLogitsWarper(s.temperature)
    if s.top_k:
        yield TopKLogitsWarper(s.top_k)
    if s.top_p < 1:
        yield TopPLogitsWarper(s.top_p)
    if s.min_p:
        yield MinPLogitsWarper(s.min_p)
    if s.typical_p < 1:
        yield TypicalLogitsWarper(s.typical_p)


UNIFORM = np.full(VOCAB, 1 / VOCAB)
"""The guess after longer texts, where the target's distribution is not enumerated."""


def equal_to_target(sampling: SamplingParams) -> NextProbs:
    probs = exact_probs(sampling)
    return lambda text: probs.get(text[len(PROMPT) :], UNIFORM)


def reversed_target(sampling: SamplingParams) -> NextProbs:
    equal = equal_to_target(sampling)
    return lambda text: equal(text)[::-1]


def on_an_unlikely_token(sampling: SamplingParams) -> NextProbs:
    """Return a distribution with nearly all mass on the target's least likely token.

    The target may give that token probability 0.
    """
    equal = equal_to_target(sampling)

    def draft_probs(text: Text) -> Probs:
        drafted = np.full(VOCAB, 0.01 / (VOCAB - 1))
        drafted[equal(text).argmin()] = 0.99
        return drafted

    return draft_probs


def flat(sampling: SamplingParams) -> NextProbs:
    """Return the uniform distribution: the target accepts many of its tokens, and rejects many."""
    return lambda text: UNIFORM


def against_enumeration(samples: npt.NDArray[np.int64], sampling: SamplingParams) -> Comparison:
    """Compare the joint distribution of three tokens, [draws, 3], with exact enumeration."""
    probs = exact_probs(sampling)
    ends = sampling.min_tokens > 0
    expected = np.zeros(VOCAB**LENGTH)
    for i, text in enumerate(itertools.product(range(VOCAB), repeat=LENGTH)):
        if not ends or END not in text[:-1]:
            expected[i] = probs[()][text[0]] * probs[text[:1]][text[1]] * probs[text[:2]][text[2]]
    if ends:
        # A text that ended is padded with the end token.
        for a in range(VOCAB):
            if a != END:
                expected[(a * VOCAB + END) * VOCAB + END] = probs[()][a] * probs[(a,)][END]
        expected[(END * VOCAB + END) * VOCAB + END] = probs[()][END]
    observed = np.bincount(samples @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**LENGTH)
    return compare(observed, expected * len(samples))
