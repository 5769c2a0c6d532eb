"""Replaces a model's linear layers with layers that have less overhead on a CPU.

Five things cost time besides the product itself:
- safetensors maps its file, and reading mapped pages is a third slower than reading ordinary
  memory. So weights are copied out of the file.
- A weight has more small pages than the processor's TLB can hold. So reordered weights lie in huge
  pages.
- oneDNN reorders a bfloat16 weight for every product, unless it was reordered once beforehand.
- Each product spends some 30 microseconds before it reads at full speed. So layers that share an
  input become one product.
- Each call of a module looks for hooks, and a forward of a few milliseconds has more than 40 such
  calls. So the layers here skip this.
Without int8, results change in their last bits at most.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch.nn.functional import linear

from outrider.errors import invalid
from outrider.lm.cpu.library import library, prefix
from outrider.lm.fused_linear import SIBLINGS, FusedLinear, FusedLinearPart, MakeLayer, fusible

# This byte stands for zero in a weight of int8.
_ZERO = 128
# The number of a weight's rows that are quantised at a time: in float32, the whole lm_head of a
# large vocabulary would take gigabytes.
_ROWS = 4096


class LeanLinear(torch.nn.Module):
    """A `torch.nn.Linear` whose call does not look for hooks; maps x [..., in] to [..., out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # `weight` and `bias` are tensors rather than parameters, because a module takes longer to
        # find its parameters.
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what the replaced layer computes."""
        return linear(x, self.weight, self.bias)

    __call__ = forward


class PackedLinear(torch.nn.Module):
    """A `torch.nn.Linear` with its weight in oneDNN's order; maps x [..., in] to [..., out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach().clone()
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what the replaced layer computes."""
        out = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return cast(torch.Tensor, out)

    __call__ = forward


class LinearStruct(ctypes.Structure):
    """`struct linear` in C."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tiles", "bias", "scales")),
        *((name, ctypes.c_int64) for name in ("in_features", "out_features")),
    )


class TiledLinear(torch.nn.Module):
    """A bfloat16 or float32 `torch.nn.Linear` with its weight in tiles, computed by `gemm.h`.

    Maps x [..., in] to [..., out].
    """

    BLOCK = 32
    """`in` must be a multiple of `BLOCK`, and `out` is padded to a multiple of it."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, int8: bool = False
    ) -> None:
        """`int8` keeps a bfloat16 weight in int8, with a scale for each output."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.numbers = "int8" if int8 else _name(weight.dtype)
        """The type in which the weight is kept."""
        self._bias = None if bias is None else _padded(bias.detach(), self.BLOCK).clone()
        weight = weight.detach()
        self._scales: torch.Tensor | None = None
        if int8:
            weight, scales = _quantized(weight)
            self._scales = _padded(scales, self.BLOCK)
        self._tiles = _tiles(weight, self.BLOCK, self.numbers)
        self.struct = LinearStruct(
            self._tiles.data_ptr(),
            *(None if it is None else it.data_ptr() for it in (self._bias, self._scales)),
            self.in_features,
            self.out_features,
        )
        self._gemm = _gemm_function(self.numbers)

    @classmethod
    def supports(cls, weight: torch.Tensor) -> bool:
        """Return whether the library was built and supports this weight [out, in]."""
        is_whole = weight.shape[1] % cls.BLOCK == 0
        return is_whole and _gemm_function(_name(weight.dtype)) is not None

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the weight [out, in], for models that look at it."""
        outs = self._tiles.permute(0, 2, 4, 1, 3, 5).reshape(-1, self.in_features)
        if self._scales is not None:
            outs = _widened(outs, self._scales, self.dtype)
        return outs[: self.out_features]

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias [out], or None."""
        return None if self._bias is None else self._bias[: self.out_features]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what the replaced layer computes.

        Raises RuntimeError for an input of another type, as the replaced layer does, and
        MemoryError if there is no memory for the input in int8.
        """
        if x.dtype is not self.dtype:
            raise RuntimeError(f"the input is {x.dtype}, but the weight is {self.dtype}")
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features)
        rows = x.numel() // self.in_features
        if not self._gemm(self.struct, x.data_ptr(), rows, out.data_ptr()):
            raise MemoryError(f"no memory for {rows} rows of {self.in_features} numbers in int8")
        return out

    __call__ = forward


def _quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [out, in] as bytes, in which 128 stands for zero, and the scales [out]."""
    scales = torch.empty(len(weight), dtype=torch.float32)
    found = torch.empty(weight.shape, dtype=torch.uint8)
    for rows in _blocks(len(weight)):
        some = weight[rows].float()
        scales[rows] = some.abs().amax(1) / 127
        # A row of zeros has scale zero, and any divisor will do.
        some /= scales[rows].clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
        found[rows] = some.round_().clamp_(-127, 127).add_(_ZERO)
    return found, scales


def _widened(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return, up to rounding, the weight [out, in] that `_quantized` made into these numbers."""
    found = torch.empty(numbers.shape, dtype=dtype)
    for rows in _blocks(len(numbers)):
        found[rows] = ((numbers[rows].float() - _ZERO) * scales[rows].unsqueeze(1)).to(dtype)
    return found


def _blocks(count: int) -> Iterator[slice]:
    """Yield slices that cut `count` rows into blocks of at most `_ROWS` rows."""
    for start in range(0, count, _ROWS):
        yield slice(start, start + _ROWS)


def _tiles(weight: torch.Tensor, block: int, numbers: str) -> torch.Tensor:
    """Reorder a weight [out, in] as `struct linear` in C describes, padded with zeros.

    The result is [blocks of out, blocks of in, parts of `line` columns, lines, columns, `pair`].
    """
    line, pair = _constant(numbers, "line"), _constant(numbers, "pair")
    lines = _padded(weight, block).view(
        -1, block // line, line, weight.shape[1] // block, block // pair, pair
    )
    tiles = lines.permute(0, 3, 1, 4, 2, 5)
    return in_huge_pages(tiles.shape, weight.dtype).copy_(tiles)


def in_huge_pages(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor in pages of 2 MiB, where the system has them.

    With pages of 4 KiB a product took 1.06 to 1.09 times as long as with pages of 2 MiB on an EPYC
    (Zen 3).
    """
    memory = mmap.mmap(-1, shape.numel() * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A Linux kernel without huge pages refuses the advice, and other systems have no such advice.
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _padded(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """Pad the first dimension with zeros to a multiple of `block`."""
    return torch.cat([tensor, tensor.new_zeros(-len(tensor) % block, *tensor.shape[1:])])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _constant(numbers: str, name: str) -> int:
    """Return the library's constant `name` for weights of this type."""
    found = library()
    assert found is not None
    return ctypes.c_int64.in_dll(found, prefix(numbers) + name).value


def _gemm_function(numbers: str) -> Any:
    """Return the library's matrix product for weights of this type, or None."""
    function = getattr(library(), f"{prefix(numbers)}product", None)
    if function is not None:
        function.argtypes = (
            ctypes.POINTER(LinearStruct),
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
        )
        function.restype = ctypes.c_int64
    return function


CpuLinear = LeanLinear | PackedLinear | TiledLinear


def fastest_dtype() -> torch.dtype:
    """Return bfloat16 if the library multiplies it, else float32."""
    return torch.float32 if _gemm_function("bfloat16") is None else torch.bfloat16


def int8_is_faster() -> bool:
    """Return whether int8 draft models were measured to be faster than bfloat16 with this library.

    `decoder.c` has the answer for each kind of processor.
    """
    return _gemm_function("int8") is not None and bool(_constant("int8", "default"))


def dtype_for_int8(dtype: str, device: torch.device) -> str:
    """Return the type in which a model with int8 weights computes.

    Raises OutriderError(INVALID_VALUE) if int8 weights are impossible here.
    """
    if device.type != "cpu":
        raise invalid("weights", f"int8 is for CPUs, not for {device.type}: set device to cpu")
    if dtype not in ("auto", "bfloat16"):
        why = f"int8 computes in bfloat16, not in {dtype}: set dtype to auto or bfloat16"
        raise invalid("weights", why)
    if _gemm_function("int8") is None:
        why = "int8 needs the C kernels, which were not built: install with a C compiler"
        raise invalid("weights", why)
    return "bfloat16"


def optimize_for_cpu(
    model: torch.nn.Module, siblings: Sequence[Sequence[str]] = SIBLINGS, *, int8: bool = False
) -> None:
    """Copy the weights into ordinary memory and replace the linear layers, in place.

    `siblings` are groups of names of layers; a group becomes one product if a module has all layers
    of the group. A reordered weight is no longer tied to an embedding, which keeps its own copy.
    Subclasses of `torch.nn.Linear`, and weights that are not used through a layer, are copied but
    not replaced.

    `int8` keeps the bfloat16 weights of layers in int8, which changes results. Layers whose input
    size is no multiple of `TiledLinear.BLOCK` stay in bfloat16; without the library, all layers do.
    """
    groups = [layers for module in model.modules() for layers in fusible(module, siblings)]
    fused = {layer for layers in groups for layer in layers}
    # Fusing and reordering copy a weight out of the file. A copy before that would double the
    # model's memory for a while, and the heap would stay that large.
    unfused = (module for module in model.modules() if module not in fused)
    in_file = [module for module in unfused if _cpu_class(module) in (None, LeanLinear)]
    to_copy = {
        id(parameter) for module in in_file for parameter in module.parameters(recurse=False)
    }
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) in to_copy:
                parameter.data = parameter.data.clone()
        _replace(model, siblings, partial(_replacement, int8=int8))


def _cpu_class(module: torch.nn.Module) -> type[CpuLinear] | None:
    """Return the class that replaces a layer; None if the layer is not replaced."""
    if type(module) is not torch.nn.Linear:
        return None
    if TiledLinear.supports(module.weight):
        return TiledLinear
    mkldnn = torch.ops.mkldnn
    packs = hasattr(mkldnn, "_linear_pointwise") and mkldnn._is_mkldnn_bf16_supported()
    if packs and module.weight.dtype is torch.bfloat16:
        return PackedLinear
    return LeanLinear


def _replace(
    module: torch.nn.Module, siblings: Sequence[Sequence[str]], replacement: MakeLayer
) -> None:
    """Replace all linear layers below `module`."""
    parts: dict[torch.nn.Module, FusedLinearPart] = {}
    for layers in fusible(module, siblings):
        fused = FusedLinear(layers, replacement, contiguous=True)
        parts |= {layer: FusedLinearPart(fused, i) for i, layer in enumerate(layers)}
    for name, child in module.named_children():
        if child in parts:
            setattr(module, name, parts[child])
        elif type(child) is torch.nn.Linear:
            setattr(module, name, replacement(child, child.weight, child.bias))
        else:
            _replace(child, siblings, replacement)


def _replacement(
    like: torch.nn.Linear, weight: torch.Tensor, bias: torch.Tensor | None, *, int8: bool
) -> CpuLinear:
    """Create a layer of the class that replaces `like`, with this weight and bias."""
    kind = _cpu_class(like) or LeanLinear
    if kind is TiledLinear:
        # Some layers of a bfloat16 model stay in float32.
        return TiledLinear(weight, bias, int8=int8 and weight.dtype is torch.bfloat16)
    return kind(weight, bias)
