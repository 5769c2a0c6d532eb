"""A tiny random model, and the exact distribution of its next three tokens by transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from chi_square import Comparison, compare
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
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

from outrider.protocol.messages import SamplingParams

VOCAB = 16
LENGTH = 3
PROMPT = [3, 5, 7, 5]
END = 9

Probs = npt.NDArray[np.float64]
NextProbs = Callable[[tuple[int, ...]], Probs]
"""The distribution that a drafter draws from behind some generated tokens."""


@cache
def tiny_model() -> LlamaForCausalLM:
    """Random weights, large enough for peaked distributions."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
        model.lm_head.weight.mul_(2.0)
    return model


@cache
def exact_probs(sampling: SamplingParams) -> dict[tuple[int, ...], Probs]:
    """The distribution of the next token by each text of up to two tokens, by transformers."""
    probs: dict[tuple[int, ...], Probs] = {}
    for length in range(LENGTH):
        texts = list(itertools.product(range(VOCAB), repeat=length))
        ids = torch.tensor([[*PROMPT, *text] for text in texts])
        with torch.inference_mode():
            logits = tiny_model()(ids).logits[:, -1].float()
        scores = processors(sampling)(ids, logits)
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
    """transformers' processors for the settings, in its own order."""
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
"""Behind longer texts, where the target's distribution is not enumerated."""


def equal_to_target(sampling: SamplingParams) -> NextProbs:
    probs = exact_probs(sampling)
    return lambda text: probs.get(text, UNIFORM)


def reversed_target(sampling: SamplingParams) -> NextProbs:
    probs = exact_probs(sampling)
    return lambda text: probs.get(text, UNIFORM)[::-1]


def on_an_unlikely_token(sampling: SamplingParams) -> NextProbs:
    """Nearly all mass on the target's least likely token, which may have probability 0."""
    probs = exact_probs(sampling)

    def draft_probs(text: tuple[int, ...]) -> Probs:
        drafted = np.full(VOCAB, 0.01 / (VOCAB - 1))
        drafted[probs.get(text, UNIFORM).argmin()] = 0.99
        return drafted

    return draft_probs


def flat(sampling: SamplingParams) -> NextProbs:
    """The uniform distribution, of which the target accepts many tokens and rejects many."""
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
