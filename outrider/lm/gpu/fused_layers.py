"""Replaces a model's small operators on a GPU by fewer ones.

Of the 30 small kernels that a Llama layer of `transformers` launches, most belong to its norms, its
rotary embedding and its gated product. Liger-Kernel has one Triton kernel for each of these. The
projections to queries, keys and values become one product: a small product reads its weight
slower than a large one.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.errors import invalid
from outrider.lm.fused_linear import ATTENTION, FusedLinear, FusedLinearPart, fusible
from outrider.sampling.tensors import triton_works

_SETTING = "fused_layers"


def fuse(model: Any, device: torch.device) -> None:
    """Replace the operators of a loaded `transformers` model.

    The rotary embedding is replaced for all models of its type in this process. Raises
    OutriderError(INVALID_VALUE) where that is not possible.
    """
    if not triton_works(device):
        raise invalid(_SETTING, f"needs a GPU on which Triton works, not {device}")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as cause:
        raise invalid(_SETTING, "needs the package liger-kernel: pip install '.[fused]'") from cause
    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise invalid(_SETTING, f"cannot be on for a model of the type {kind}")
    _join_projections(model)
    # The fused losses are for training, and would replace the forward.
    _apply_liger_kernel_to_instance(model, cross_entropy=False, fused_linear_cross_entropy=False)


def _join_projections(model: torch.nn.Module) -> None:
    """Join the projections of each attention.

    Those of the gated product stay as they are: they are large, and Liger-Kernel would copy the
    halves of a joined result.
    """
    for module in [*model.modules()]:
        for layers in fusible(module, [ATTENTION]):
            fused = FusedLinear(layers, _linear)
            for index, name in enumerate(ATTENTION):
                setattr(module, name, FusedLinearPart(fused, index))
            # Else the parts of two layers would be in memory that neither can use.
            torch.cuda.empty_cache()


def _linear(
    like: torch.nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.nn.Linear:
    out_features, in_features = weight.shape
    # Without memory of its own.
    layer = torch.nn.Linear(in_features, out_features, bias is not None, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer
