"""Computes in one product several layers that share an input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

ATTENTION = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")
SIBLINGS = (ATTENTION, GATED)
"""Groups of names of layers in one module. A model calls a group's layers with the same input."""

MakeLayer = Callable[[torch.nn.Linear, torch.Tensor, torch.Tensor | None], torch.nn.Module]
"""Makes a layer that computes like the given layer, but with the given weight and bias."""


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.nn.Linear:
    """Make a layer that shares this weight [out, in] and bias [out]."""
    out_features, in_features = weight.shape
    layer = torch.nn.Linear(in_features, out_features, bias is not None, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = torch.nn.Parameter(bias, requires_grad=False)
    return layer


def joined(layers: Sequence[torch.nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weights of `layers` joined to one [out, in], and the biases joined to one [out].

    The second result is None if no layer has a bias.
    """
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    return weight, torch.cat(biases) if biases else None


class FusedLinear:
    """Computes in one product several layers that share an input.

    The first call with an input computes all layers; the call of the last layer drops the outputs.
    """

    def __init__(
        self, layers: Sequence[torch.nn.Linear], make: MakeLayer, *, contiguous: bool = False
    ) -> None:
        """`make` makes a layer like `layers[0]`, with the joined weights and biases of `layers`.

        `contiguous` copies the outputs out of the product, because torch's GELU of strided numbers
        has other bits than its GELU of contiguous numbers. Without a copy, only the outputs of a
        single row are contiguous.
        """
        self._contiguous = contiguous
        self.layer = make(layers[0], *joined(layers))
        self._sizes = [layer.out_features for layer in layers]
        self._input: torch.Tensor | None = None
        self._outputs: Sequence[torch.Tensor] = ()

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of layer `index` for the input x [..., in]."""
        if x is not self._input:
            self._outputs = torch.split(self.layer(x), self._sizes, -1)
            if self._contiguous:
                self._outputs = [part.contiguous() for part in self._outputs]
            self._input = x
        out = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input = None
            self._outputs = ()
        return out


class FusedLinearPart(torch.nn.Module):
    """One of the layers of a `FusedLinear`; maps x [..., in] to [..., out]."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        self.fused = fused
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what the replaced layer computes."""
        return self.fused.part(self._index, x)

    __call__ = forward


def fusible(
    module: torch.nn.Module, siblings: Sequence[Sequence[str]] = SIBLINGS
) -> list[list[torch.nn.Linear]]:
    """Return the groups of children that share an input, each group in the order of the calls."""
    found = []
    for names in siblings:
        layers = [getattr(module, name, None) for name in names]
        linears = [layer for layer in layers if type(layer) is torch.nn.Linear]
        kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in linears}
        if len(linears) == len(names) and len(kinds) == 1:
            found.append(linears)
    return found
