"""The first part of a head that reads several of the target's states: norms, and the matrix `fc`.

This part needs nothing but a token's states, and makes one state of them. So a verifier can apply
it before it sends features, which then have a third to a fifth of the bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch.nn import Linear, Module, ModuleList, RMSNorm

from outrider.heads.modules import fill
from outrider.heads.spec import Head, HeadSpec


class Projection(Module):
    """Brings feature rows [T, feature width] to the head's width [T, hidden size]."""

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        if spec.decoder is None:
            raise ValueError(f"a head of the kind {spec.kind} has no projection")
        count, eps = len(spec.aux_layers), spec.decoder.norm_eps
        self.fc = Linear(spec.feature_width, spec.decoder.hidden_size, bias=spec.join_bias)
        self.fc_norm = ModuleList()
        if spec.feature_norms:
            self.fc_norm.extend(RMSNorm(spec.target.hidden_size, eps=eps) for _ in range(count))
        self.input_norm = RMSNorm(spec.feature_width, eps=eps) if spec.row_norm else None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Project rows, which must have the dtype of the weights."""
        if self.fc_norm:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            norms = zip(self.fc_norm, parts, strict=True)
            features = torch.cat([norm(part) for norm, part in norms], dim=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        projected: torch.Tensor = self.fc(features)
        return projected


def projection_tensors(head: Head) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a head's projection, keyed as in `Projection`; empty if it has none."""
    if not head.spec.aux_layers:
        return {}
    names = [name for name in head.tensors if name.partition(".")[0] in _PARTS]
    return {name: head.tensors[name] for name in sorted(names)}


_PARTS = ("fc", "fc_norm", "input_norm")


def projection_name(head: Head) -> str:
    """Name a projection by what it computes: a SHA-256 (hex) of its states, norms and weights.

    With such a name, a drafter cannot get rows that another head's projection made. The name is
    empty if the head has no projection.
    """
    tensors = projection_tensors(head)
    if not tensors or head.spec.decoder is None:
        return ""
    digest = hashlib.sha256(f"{head.spec.aux_layers} {head.spec.decoder.norm_eps}".encode())
    for name, tensor in tensors.items():
        digest.update(f" {name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class ServedProjection:
    """A head's projection at a verifier. It takes features of any float type."""

    def __init__(self, head: Head, device: torch.device) -> None:
        """Raises ValueError for a head that has no projection."""
        self._tensors = projection_tensors(head)
        if not self._tensors or head.spec.decoder is None:
            raise ValueError(f"a head of the kind {head.spec.kind} has no projection")
        self.states = list(head.spec.aux_layers)
        self.projected_width = head.spec.decoder.hidden_size
        self._spec = head.spec
        self._device = device
        self._made: dict[torch.dtype, Projection] = {}

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Project rows as a drafter that computes in the rows' type would; [R, projected_width]."""
        dtype = features.dtype
        if dtype not in self._made:
            with torch.device("meta"):
                made = Projection(self._spec)
            fill(made, {name: each.to(self._device, dtype) for name, each in self._tensors.items()})
            self._made[dtype] = made.eval()
        projected: torch.Tensor = self._made[dtype](features)
        return projected
