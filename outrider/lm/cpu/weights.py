"""A model's linear layers on a CPU, where what surrounds a product can cost more than the product.

safetensors maps the file, whose pages were measured to be read a third slower than ordinary memory; so weights are copied out of
it. oneDNN puts a bfloat16 weight in its own order anew for every product, unless that was done once before. Layers that are given
the same input make one product, since each costs some 30 microseconds before it reads at full speed. And a module's call looks for
hooks, 40 times and more in a forward of a few milliseconds. Results change in their last bits at most.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.nn.functional import linear

from outrider.lm.cpu.library import library, prefix

# Children of one module that models call one after the other with the same input.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class LeanLinear(torch.nn.Module):
    """A `torch.nn.Linear` that is called without looking for hooks; x [..., in] to [..., out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Tensors rather than parameters, since those are looked up the slow way.
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same as the layer it was made from."""
        return linear(x, self.weight, self.bias)

    __call__ = forward


class PackedLinear(torch.nn.Module):
    """A `torch.nn.Linear` whose weight was put in oneDNN's order beforehand; x [..., in] to [..., out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach().clone()
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same as the layer it was made from."""
        return cast(
            torch.Tensor,
            torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], ""),
        )

    __call__ = forward


class LinearStruct(ctypes.Structure):
    """`struct linear` in C."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tiles", "bias")),
        *((name, ctypes.c_int64) for name in ("in_features", "out_features")),
    )


class TiledLinear(torch.nn.Module):
    """A `torch.nn.Linear` in bfloat16 or float32 by `decoder.c`, its weight in tiles; x [..., in] to [..., out]."""

    BLOCK = 32
    """Inputs are a multiple of this; outputs are filled up to one."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else _whole_blocks(bias.detach(), self.BLOCK).clone()
        self._tiles = _tiles(weight.detach(), self.BLOCK, _line(weight.dtype))
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self.dtype = weight.dtype
        self.struct = LinearStruct(
            self._tiles.data_ptr(), bias_address, self.in_features, self.out_features
        )
        self._product = _product_function(weight.dtype)

    @classmethod
    def takes(cls, weight: torch.Tensor) -> bool:
        """Whether the library is there and can do such a weight [out, in]."""
        return weight.shape[1] % cls.BLOCK == 0 and _product_function(weight.dtype) is not None

    @property
    def weight(self) -> torch.Tensor:
        """A copy [out, in], for models that look at it."""
        outs = self._tiles.permute(0, 2, 4, 1, 3, 5).reshape(-1, self.in_features)
        return outs[: self.out_features]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same as the layer it was made from; raises RuntimeError for an input of another type, as that does."""
        if x.dtype is not self.dtype:
            raise RuntimeError(f"an input of {x.dtype} for a weight of {self.dtype}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        self._product(self.struct, x.data_ptr(), x.numel() // self.in_features, out.data_ptr())
        return out

    __call__ = forward


def _tiles(weight: torch.Tensor, block: int, line: int) -> torch.Tensor:
    """[out, in] as [blocks of out, blocks of in, parts of a line, lines, `line` out, pair of in], filled up with zeros."""
    pair = 4 // weight.itemsize
    lines = _whole_blocks(weight, block).view(
        -1, block // line, line, weight.shape[1] // block, block // pair, pair
    )
    return lines.permute(0, 3, 1, 4, 2, 5).contiguous()


def _whole_blocks(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """With zeros behind the last row, or number."""
    return torch.cat([tensor, tensor.new_zeros(-len(tensor) % block, *tensor.shape[1:])])


def _line(dtype: torch.dtype) -> int:
    """Columns of weights that the library wants side by side."""
    found = library()
    assert found is not None
    return ctypes.c_int64.in_dll(found, f"{prefix(dtype)}line").value


def _product_function(dtype: torch.dtype) -> Any:
    """None where there is none."""
    function = getattr(library(), f"{prefix(dtype)}product", None)
    if function is not None:
        function.argtypes = (
            ctypes.POINTER(LinearStruct),
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
        )
        function.restype = None
    return function


Settled = LeanLinear | PackedLinear | TiledLinear


class Joint:
    """Several layers as one: whichever is called first with an input computes them all, and the last one lets go of it."""

    def __init__(self, layer: Settled, sizes: Sequence[int]) -> None:
        self.layer = layer
        self._sizes = list(sizes)
        self._input: torch.Tensor | None = None
        self._outputs: Sequence[torch.Tensor] = ()

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self._input:
            self._input, self._outputs = x, torch.split(self.layer(x), self._sizes, -1)
        out = self._outputs[index]
        if index == len(self._sizes) - 1:
            self._input, self._outputs = None, ()
        return out


class JointLinear(torch.nn.Module):
    """One `torch.nn.Linear` of several that share their input; x [..., in] to [..., out]."""

    def __init__(self, joint: Joint, index: int) -> None:
        super().__init__()
        self.joint, self._index = joint, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same as the layer it was made from."""
        return self.joint.part(self._index, x)

    __call__ = forward


def settle_on_cpu(model: torch.nn.Module) -> None:
    """Move the weights into memory of our own, and replace the linear layers.

    A weight that is put in another order is no longer tied to an embedding, which keeps it as it was. Subclasses of
    `torch.nn.Linear`, and weights that are not used through a layer, stay as they are.
    """
    joined = {
        layer for module in model.modules() for layers in _joinable(module) for layer in layers
    }
    # Joining and putting in another order copy a weight out of the file by themselves; copied before as well, the model would for a
    # while, and its heap for ever, be twice as large.
    taken = [
        module
        for module in model.modules()
        if module not in joined and _settled_class(module) in (None, LeanLinear)
    ]
    copied = {id(parameter) for module in taken for parameter in module.parameters(recurse=False)}
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) in copied:
                parameter.data = parameter.data.clone()
        _replace(model)


def _joinable(module: torch.nn.Module) -> list[list[torch.nn.Linear]]:
    """The children that share their input, in the order of their calls."""
    found = []
    for names in _SIBLINGS:
        layers = [getattr(module, name, None) for name in names]
        linears = [layer for layer in layers if type(layer) is torch.nn.Linear]
        alike = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in linears}
        if len(linears) == len(names) and len(alike) == 1:
            found.append(linears)
    return found


def _settled_class(module: torch.nn.Module) -> type[Settled] | None:
    """What a layer becomes; None for what stays as it is."""
    if type(module) is not torch.nn.Linear:
        return None
    if TiledLinear.takes(module.weight):
        return TiledLinear
    packs_bfloat16 = (
        hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return PackedLinear if packs_bfloat16 and module.weight.dtype is torch.bfloat16 else LeanLinear


def _replace(module: torch.nn.Module) -> None:
    def settled(like: torch.nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> Settled:
        return (_settled_class(like) or LeanLinear)(weight, bias)

    parts: dict[torch.nn.Module, JointLinear] = {}
    for layers in _joinable(module):
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        bias = torch.cat(biases) if biases else None
        joint = Joint(settled(layers[0], weight, bias), [layer.out_features for layer in layers])
        parts |= {layer: JointLinear(joint, i) for i, layer in enumerate(layers)}
    for name, child in module.named_children():
        if child in parts:
            setattr(module, name, parts[child])
        elif type(child) is torch.nn.Linear:
            setattr(module, name, settled(child, child.weight, child.bias))
        else:
            _replace(child)
