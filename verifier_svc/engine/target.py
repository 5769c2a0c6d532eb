"""The target model as the engine sees it, and the limits within which it is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from outrider.draft_tokens_policy import DraftTokensPolicy
from outrider.lm.runner import SequenceSlice


class LanguageModel(Protocol):
    """What the engine needs of a model; `outrider.lm.runner.ModelRunner` is one."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Float32 logits [R, V] for the last `logit_count` tokens of each slice, in order."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`depth` says how many draft tokens of a sequence a step verifies, unless its request does.

    `scored_logits_bytes` bounds the logits that a step computes for prompts whose log probabilities
    are wanted. The others are counts.
    """

    depth: DraftTokensPolicy = field(default_factory=lambda: DraftTokensPolicy("fixed", 4))
    max_batch_tokens: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    max_drafters: int = 64
    scored_logits_bytes: int = 2**28
