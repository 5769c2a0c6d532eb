"""Describes how a layer's attention weighs keys: scale, window, soft cap and sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Softmax:
    """The settings by which a layer weighs the keys that a token sees.

    Scores are products times `scale`; with a `softcap` they are squashed to (-softcap, softcap).
    With a `window`, a token sees the last `window` positions of its text, its own included; if
    `chunked`, the text is cut every `window` positions, and a token sees its own chunk (Llama 4).
    `sinks` [H] has one more score for each query head; the weight of this score goes to no key
    (gpt-oss).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    chunked: bool = False

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the first position that each token sees, possibly below 0; needs a `window`."""
        if self.window is None:
            raise ValueError("no window limits what a token sees")
        if self.chunked:
            return positions - positions % self.window
        return positions - self.window + 1


def counts_rows(module: Any) -> bool:
    """Return whether a layer scales queries by their row number as if it were their position.

    Llama 4 does so in layers without a rotary embedding.
    """
    return bool(getattr(module, "attn_temperature_tuning", False) and not module.use_rope)


def tuned_by_position(module: Any, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return queries [1, H, T, D] scaled by their positions [T] instead of by their rows."""
    rows = torch.arange(query.shape[2], device=query.device)
    by_position, by_row = (
        torch.log1p(torch.floor((at.float() + 1) / module.floor_scale)) * module.attn_scale + 1
        for at in (positions, rows)
    )
    tuned: torch.Tensor = (query * (by_position / by_row)[:, None]).to(query.dtype)
    return tuned
