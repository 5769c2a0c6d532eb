"""The target model's interface to the engine, and the configuration of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from outrider.lm.runner import SequenceSlice
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.token_tree import MAX_TREE_TOKENS


class LanguageModel(Protocol):
    """The model interface that the engine needs; `outrider.lm.runner.ModelRunner` has it."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Compute float32 logits [R, V]: rows for the last `logit_count` tokens of each slice."""

    def move_tokens(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy keys and values between slots of the flattened cache, in every layer.

        All sources are read before any target is written. A sequence's moves are in ascending
        order, and each goes towards the sequence's start.
        """


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of one engine.

    `draft_tokens_policy` chooses how many draft tokens of a sequence a step verifies, unless the
    request names a number. With `draft_trees` a draft may be a tree. `scored_logits_bytes` bounds
    the logits that a step computes to score prompts. The other fields are counts.
    """

    draft_tokens_policy: DraftTokensPolicy = field(
        default_factory=lambda: DraftTokensPolicy("fixed", 4)
    )
    max_batch_tokens: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    max_drafters: int = 64
    scored_logits_bytes: int = 2**28
    draft_trees: bool = False

    @property
    def largest_draft(self) -> int:
        """The maximum number of a sequence's draft tokens in a step, unless the request sets it."""
        most = self.draft_tokens_policy.max_draft_tokens
        return max(most, MAX_TREE_TOKENS) if self.draft_trees else most
