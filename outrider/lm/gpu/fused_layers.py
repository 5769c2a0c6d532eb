"""Replaces a model's small operators on a GPU by fewer ones.

Of the 30 small kernels that a Llama layer of `transformers` launches, most belong to its norms, its
rotary embedding and its gated product. Liger-Kernel has one Triton kernel for each of these. The
projections to queries, keys and values become one product: a small product reads its weight
slower than a large one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from outrider.lm.fused_linear import ATTENTION, FusedLinear, FusedLinearPart, fusible, linear_of
from outrider.sampling.tensors import triton_works

log = logging.getLogger(__name__)

_UNFUSED = "%s is served without Liger-Kernel's kernels: %s"
_MISSING = "the package liger-kernel is missing (in Outrider's sources, pip install '.[fused]')"
_ABSENT = object()

_Attributes = dict[str, Any]
# What Liger-Kernel replaced for all models of a type: attributes of a module, the function's name,
# the model's own function, and the kernel's.
_shared: list[tuple[_Attributes, str, Any, Any]] = []


def use_kernels(model: Any, name: str, device: torch.device) -> Callable[[], None] | None:
    """Have a loaded `transformers` model compute by Liger-Kernel's kernels, where they are.

    Return what undoes it; None if nothing changed, with the reason in the log on a GPU. The rotary
    embedding changes for all models of its type in this process.
    """
    if not triton_works(device):
        return None
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        log.info(_UNFUSED, name, _MISSING)
        return None
    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        log.info(_UNFUSED, name, f"it has none for the type {kind}")
        return None
    code = {sys.modules[type(module).__module__] for module in model.modules()}
    before = [(vars(each), vars(each).copy()) for each in (*model.modules(), *code)]
    try:
        # The fused losses are for training, and would replace the forward.
        _apply_liger_kernel_to_instance(
            model, cross_entropy=False, fused_linear_cross_entropy=False
        )
    except Exception as cause:  # noqa: BLE001
        # It fails in its own ways at classes or a `transformers` that it does not know.
        _restore(_changes(before))
        log.warning(_UNFUSED, name, f"{type(cause).__name__}: {cause}")
        return None
    changes = _changes(before)
    # It also replaces classes. Later models, and their own logits, are to be of the real ones.
    _restore([change for change in changes if isinstance(change[2], type)])
    modules = [vars(each) for each in code]
    shared = [
        (attributes, function, own, attributes[function])
        for attributes, function, own in changes
        if not isinstance(own, type) and any(attributes is each for each in modules)
    ]
    _shared.extend(shared)

    def undo() -> None:
        for each in shared:
            _shared.remove(each)
        _restore(changes)

    return undo


@contextmanager
def own_functions() -> Iterator[None]:
    """Have all models compute without the kernels that were put in for a whole type.

    A model's own logits are computed so, with which its kernels are compared. No other thread may
    compute meanwhile.
    """
    kernels = [each for each in _shared if each[0].get(each[1]) is each[3]]
    _restore([(attributes, name, own) for attributes, name, own, _ in kernels])
    try:
        yield
    finally:
        _restore([(attributes, name, kernel) for attributes, name, _, kernel in kernels])


def _changes(before: list[tuple[_Attributes, _Attributes]]) -> list[tuple[_Attributes, str, Any]]:
    """Return the attributes that differ from their copy, each with its earlier value."""
    return [
        (attributes, name, copy.get(name, _ABSENT))
        for attributes, copy in before
        for name, value in attributes.items()
        if copy.get(name, _ABSENT) is not value
    ]


def _restore(changes: list[tuple[_Attributes, str, Any]]) -> None:
    for attributes, name, value in changes:
        if value is _ABSENT:
            del attributes[name]
        else:
            attributes[name] = value


def join_projections(model: torch.nn.Module) -> None:
    """Join the projections of each attention.

    The projections of the gated product are not joined: they are large, and Liger-Kernel would copy
    the halves of a joined result.
    """
    for module in [*model.modules()]:
        for layers in fusible(module, [ATTENTION]):
            fused = FusedLinear(layers, lambda _, weight, bias: linear_of(weight, bias))
            for index, name in enumerate(ATTENTION):
                setattr(module, name, FusedLinearPart(fused, index))
            # Else the parts of two layers would be in memory that neither can use.
            torch.cuda.empty_cache()
