"""A model's linear layers on a CPU, where what surrounds a product can cost more than the product.

safetensors maps the file, whose pages were measured to be read a third slower than ordinary memory; so weights are copied out of
it. oneDNN puts a bfloat16 weight in its own order anew for every product, unless that was done once before. And a module's call
looks for hooks, 40 times and more in a forward of a few milliseconds. None of this changes a result.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.nn.functional import linear


class LeanLinear(torch.nn.Module):
    """A `torch.nn.Linear` that is called without looking for hooks; x [..., in] to [..., out]."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        # Tensors rather than parameters, since those are looked up the slow way.
        self.weight = layer.weight.detach()
        self.bias = None if layer.bias is None else layer.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same as the layer it was made from."""
        return linear(x, self.weight, self.bias)

    __call__ = forward


class PackedLinear(torch.nn.Module):
    """A `torch.nn.Linear` whose weight was put in oneDNN's order beforehand; x [..., in] to [..., out]."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = None if layer.bias is None else layer.bias.detach().clone()
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same as the layer it was made from."""
        return cast(torch.Tensor, torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], ""))

    __call__ = forward


def settle_on_cpu(model: torch.nn.Module) -> None:
    """Move the weights into memory of our own, and replace the linear layers; ties between weights are kept.

    Subclasses of `torch.nn.Linear`, and weights that are not used through a layer, stay as they are.
    """
    packs_bfloat16 = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # Packing copies a weight out of the file by itself; copied before as well, the model would for a while, and its heap for ever,
    # be twice as large.
    copied = {id(p) for m in model.modules() if not _packable(m, packs_bfloat16) for p in m.parameters(recurse=False)}
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) in copied:
                parameter.data = parameter.data.clone()
        _replace(model, packs_bfloat16)


def _packable(module: torch.nn.Module, packs_bfloat16: bool) -> bool:
    return type(module) is torch.nn.Linear and packs_bfloat16 and module.weight.dtype is torch.bfloat16


def _replace(module: torch.nn.Module, packs_bfloat16: bool) -> None:
    for name, child in module.named_children():
        if type(child) is torch.nn.Linear:
            setattr(module, name, PackedLinear(child) if _packable(child, packs_bfloat16) else LeanLinear(child))
        else:
            _replace(child, packs_bfloat16)
