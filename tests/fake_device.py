"""A device that pretends to compute like a GPU, and counts what the host does with it.

The device's tensors lie on the CPU, but say that they are on a GPU. So the tested code takes its
branches for a GPU, and every operator, copy and wait for the device passes through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

DEVICE = torch.device("cuda", 0)

_aten = torch.ops.aten
# Operators that wait: the host has to know the size or a value of their result.
_WAITS = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
}


# Outside inference mode, torch replaces these operators by `_to_copy` before they come here.
_COPIES_IN_INFERENCE_MODE = {
    _aten.to.device,
    _aten.to.dtype,
    _aten.to.dtype_layout,
    _aten.to.other,
}


class Far(torch.Tensor):
    """A tensor of the fake device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Far:
        made: Far = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            # Torch without CUDA has operators for tensors on `meta`, but none for tensors on a GPU.
            device="meta",
        )
        made.held = held
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The fake device. Torch itself believes that the tensor is on `meta`."""
        return DEVICE

    def tolist(self) -> Any:
        """Return the numbers, after the copy to the host that torch makes of a GPU's tensor."""
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the indexed numbers.

        A list of indices is first copied to the device, which blocks.
        """
        return super().__getitem__(_on_device(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_on_device(index), value)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} runs on the fake device, which is not active")


def _on_device(index: Any) -> Any:
    return torch.as_tensor(index).to(DEVICE) if isinstance(index, list) else index


class FakeDevice(TorchDispatchMode):
    """Runs the operators of a `with` block.

    It counts the operators, the copies, and the host's waits for the device.
    """

    def __init__(self, on_wait: Callable[[], object] = bool) -> None:
        """`on_wait` is called at each wait."""
        super().__init__()
        self.operators = 0
        """Operators on the device that are neither views nor copies from or to the host."""
        self.copies = 0
        """Copies from the host."""
        self.waits = 0
        """Copies to the host, blocking copies from it, and operators that wait."""
        self._on_wait = on_wait
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        for name, kernel in _KERNELS.items():
            self._patches.enter_context(patch(name, self._kernel(kernel)))
        for module in ("sampler", "penalties"):
            self._patches.enter_context(
                patch(f"outrider.sampling.{module}.triton_works", lambda device: True)
            )
        for name in ("tensor", "as_tensor"):
            make = getattr(torch, name)
            self._patches.enter_context(patch(f"torch.{name}", self._factory(make)))
        if not torch.cuda.is_available():
            # A GPU as destination would make torch start CUDA, which is not installed.
            self._patches.enter_context(patch("torch.cuda._lazy_init"))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device, without counting the copy."""
        return Far(tensor)

    def _kernel(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs the kernel and counts it as one operator."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.operators += 1
            near_args, near_kwargs = tree_map_only(Far, lambda far: far.held, (args, kwargs))
            return tree_map_only(torch.Tensor, Far, run(*near_args, **near_kwargs))

        return call

    def _factory(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a function that makes a tensor on the CPU and, given a device, copies it there.

        The copy blocks.
        """

        def call(*args: Any, device: torch.device | None = None, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            return made if device is None else made.to(device)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _COPIES_IN_INFERENCE_MODE:
            with self._again():
                return func.decompose(*args, **kwargs)
        was_far = tree_any(lambda value: isinstance(value, Far), (args, kwargs))
        target = kwargs.get("device")
        if target is not None and target.type != "cpu":
            kwargs["device"] = torch.device("cpu")
            becomes_far = True
        else:
            becomes_far = was_far and target is None
        kwargs.pop("pin_memory", None)
        self._count(func, args, kwargs, was_far=was_far, becomes_far=becomes_far)
        near_args, near_kwargs = tree_map_only(Far, lambda far: far.held, (args, kwargs))
        out = func(*near_args, **near_kwargs)
        if func is _aten._to_copy.default and was_far != becomes_far:
            out = out.clone()
        if not becomes_far:
            return out
        return tree_map_only(torch.Tensor, Far, out)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Count also the operators that implement the called operator."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _count(
        self, func: Any, args: Any, kwargs: Any, *, was_far: bool, becomes_far: bool
    ) -> None:
        indexes = func in (_aten.index.Tensor, _aten.index_put_.default)
        needs_value = was_far and (func in _WAITS or (indexes and _has_mask(args[1])))
        came, goes = was_far, becomes_far
        if func is _aten.copy_.default:
            came, goes = isinstance(args[1], Far), isinstance(args[0], Far)
        copies = func in (_aten._to_copy.default, _aten.copy_.default)
        if needs_value or (copies and came and not goes):
            self._wait()
        elif copies and goes and not came:
            self.copies += 1
            # The third argument of `copy_` is `non_blocking`.
            if not (kwargs.get("non_blocking") or args[2:3] == (True,)):
                self._wait()
        elif (was_far or becomes_far) and not func.is_view:
            self.operators += 1

    def _wait(self) -> None:
        self.waits += 1
        self._on_wait()


def _has_mask(indices: Any) -> bool:
    """Return whether one of the indices is a mask.

    The host has to know how many entries of a mask are true.
    """
    return any(isinstance(index, Far) and index.dtype is torch.bool for index in indices)


def _penalise(
    logits: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, numbers: torch.Tensor
) -> None:
    """Do `penalty_kernel.penalise` with torch's operators, as the simplest reference."""
    repetition, frequency, presence = numbers.unsqueeze(-1)
    kept = logits[rows]
    kept = torch.where(
        counts > 0, torch.where(kept < 0, kept * repetition, kept / repetition), kept
    )
    output = counts >> 1
    logits[rows] = kept - output * frequency - (output > 0) * presence


def _coupled_sample(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    from outrider.sampling.sampler import coupled_exponentials

    return (probs.double() / coupled_exponentials(keys, probs.shape[-1])).argmax(-1)


_KERNELS: dict[str, Callable[..., Any]] = {
    "outrider.sampling.penalty_kernel.penalise": _penalise,
    "outrider.sampling.noise_kernel.coupled_sample": _coupled_sample,
}
"""Replacements for kernels that our code calls only on a GPU, keyed by name.

Each counts as one operator.
"""
