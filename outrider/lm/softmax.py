"""What one layer's attention does beside its keys: scale, window, soft cap and sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Softmax:
    """How a layer weighs the keys that a token sees.

    Scores are products times `scale`; with a `softcap` they are squashed to (-softcap, softcap).
    With a `window`, a token sees the last `window` positions of its text, its own included.
    `sinks` [H] are one more score for each query head, whose weight goes to no key (gpt-oss).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
