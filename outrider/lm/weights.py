"""Where a model's weights lie on a CPU: in memory of our own, and for bfloat16 in the order its matrix units read them.

safetensors maps the file, whose pages were measured to be read half as fast as ordinary memory; and oneDNN puts a bfloat16 weight
in its own order anew for every product, unless that was done once before. Neither changes a result.
"""

from __future__ import annotations

from typing import cast

import torch


class PackedLinear(torch.nn.Module):
    """A `torch.nn.Linear` whose weight was put in oneDNN's order beforehand; x [..., in] to [..., out]."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Not a buffer: it is opaque to everything but the product below.
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same numbers as the layer it was made from."""
        return cast(torch.Tensor, torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], ""))


def settle_on_cpu(model: torch.nn.Module) -> None:
    """Move the weights into memory of our own, and pack what can be packed; ties between weights are kept.

    Layers that are called in another way than as a module, and weights that are not bfloat16, stay as they are.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        if hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            _pack(model)


def _pack(module: torch.nn.Module) -> None:
    for name, child in module.named_children():
        if type(child) is torch.nn.Linear and child.weight.dtype is torch.bfloat16:
            setattr(module, name, PackedLinear(child))
        else:
            _pack(child)
