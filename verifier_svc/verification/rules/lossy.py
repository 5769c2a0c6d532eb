"""Rules that trade exactness for speed. A request must ask for them, and its response says so.

Each rule takes the target's probabilities at N places, the draft token of each place, and the
settings of each place's request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from outrider.protocol.messages import AcceptanceRule, SpeculationOptions


def typical(probs_NV: torch.Tensor, draft_N: torch.Tensor, epsilon_N: torch.Tensor) -> torch.Tensor:
    """Apply typical acceptance (Cai et al., "Medusa", arXiv 2401.10774, 3.3.1); return bool [N].

    Accepts a draft token if its probability is above min(epsilon, delta * exp(-entropy)), with the
    paper's delta = sqrt(epsilon). The less sure the target is, the more tokens are accepted.
    """
    entropy_N = torch.special.entr(probs_NV).sum(-1)
    threshold_N = torch.minimum(epsilon_N, epsilon_N.sqrt() * torch.exp(-entropy_N))
    return probs_NV.gather(-1, draft_N.unsqueeze(-1)).squeeze(-1) > threshold_N


def relaxed(
    probs_NV: torch.Tensor, draft_N: torch.Tensor, topk_N: torch.Tensor, delta_N: torch.Tensor
) -> torch.Tensor:
    """Apply relaxed acceptance of TensorRT-LLM (its blog on DeepSeek-R1 with MTP); return bool [N].

    Accepts a draft token if it is among the `topk` likeliest tokens, and its probability is above 0
    and at most `delta` below the largest probability. The caller passes only positions in the
    thinking phase.
    """
    prob_N = probs_NV.gather(-1, draft_N.unsqueeze(-1)).squeeze(-1)
    better_N = (probs_NV > prob_N.unsqueeze(-1)).sum(-1)
    return (better_N < topk_N) & (prob_N >= probs_NV.amax(-1) - delta_N) & (prob_N > 0)


@dataclass(frozen=True, slots=True)
class LossyRule:
    """A rule, and a function that returns the request's settings for the rule's last arguments."""

    judge: Callable[..., torch.Tensor]
    settings: Callable[[SpeculationOptions], tuple[float, ...]]


LOSSY_RULES = {
    AcceptanceRule.TYPICAL: LossyRule(typical, lambda options: (options.typical_epsilon,)),
    AcceptanceRule.RELAXED: LossyRule(
        relaxed, lambda options: (options.relaxed_top_k, options.relaxed_delta)
    ),
}
