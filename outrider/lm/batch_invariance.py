"""Tells whether a forward is batch-invariant: no row's bits depend on the number of rows.

Our C kernels for CPUs keep one order of sums for all numbers of rows. Other products and attentions
choose their code by the number of rows. docs/losslessness.md says what follows for texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from outrider.lm.attention import LayerCache
from outrider.lm.cpu.weights import LeanLinear, PackedLinear


def reason_against(model: Any, layers: Iterable[LayerCache]) -> str | None:
    """Return why a row's bits may depend on the number of rows in a forward; None if they cannot.

    `layers` are the allocated caches of the model's attention layers.
    """
    if next(model.parameters()).device.type != "cpu":
        return "on a GPU the code of a product depends on the number of rows"
    if any(layer.cpu_attention is None for layer in layers):
        return "PyTorch attends in some of its layers"
    names = [name for name, module in model.named_modules() if _multiplies_by_pytorch(module)]
    if names:
        return f"PyTorch computes some of its products, the first in {names[0]}"
    return None


def _multiplies_by_pytorch(module: torch.nn.Module) -> bool:
    """Return whether PyTorch multiplies by a matrix of this module (not of its submodules)."""
    if isinstance(module, LeanLinear | PackedLinear):
        return True
    if isinstance(module, torch.nn.Embedding):
        return False
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
