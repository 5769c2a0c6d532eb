"""Accepts or rejects drafts, for tests that have the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.sampling.penalties import TokenCounts
from outrider.sampling.tensors import Staging
from verifier_svc.verification.acceptance import Acceptance
from verifier_svc.verification.draft import AcceptResult, Draft


def accept(
    logits_RV: torch.Tensor, drafts: Sequence[Draft], synthetic_rates: Sequence[float] = ()
) -> list[AcceptResult]:
    """Accept or reject every draft of a batch at once.

    The engine, unlike this function, lays out the `Acceptance` while a GPU computes the forward.
    """
    staging = Staging(logits_RV.device)
    acceptance = Acceptance(drafts, staging, TokenCounts(), synthetic_rates)
    staging.send()
    masks = [draft.context.mask for draft in drafts]
    return acceptance.results(logits_RV, masks)[0]
