"""Makes a runnable head of one in normal form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from outrider.heads.kinds.dflash import DFlash
from outrider.heads.kinds.dspark import DSpark
from outrider.heads.kinds.eagle import Eagle
from outrider.heads.kinds.eagle3 import Eagle3
from outrider.heads.kinds.medusa import Medusa
from outrider.heads.kinds.mtp import Mtp
from outrider.heads.kinds.peagle import PEagle
from outrider.heads.model import HeadModel, TargetWeights
from outrider.heads.projection import ServedProjection, projection_name
from outrider.heads.reading import read
from outrider.heads.spec import Head, Kind, refusal

_KINDS: dict[Kind, type[HeadModel]] = {
    "eagle3": Eagle3,
    "peagle": PEagle,
    "eagle": Eagle,
    "dflash": DFlash,
    "dspark": DSpark,
    "mtp": Mtp,
    "medusa": Medusa,
}
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")


def load(
    head: Head,
    target: TargetWeights,
    *,
    page_count: int,
    page_size: int = 16,
    batch_rows: int = 1024,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> HeadModel:
    """Make the model of a head; `HeadModel.load` explains the parameters."""
    with torch.device("meta"):
        model = _KINDS[head.spec.kind](head)
    model.load(
        head,
        target,
        page_count=page_count,
        page_size=page_size,
        batch_rows=batch_rows,
        dtype=dtype,
        device=device,
    )
    return model.eval()


def load_projections(
    paths: Sequence[str], target: str, device: torch.device
) -> dict[str, ServedProjection]:
    """Read the projections of heads for a target, by name.

    Raises OutriderError(INVALID_VALUE) for a folder that is no head of the target, or a head
    without a projection.
    """
    found = {}
    config = AutoConfig.from_pretrained(target) if paths else None
    for path in paths:
        head = read(path, config)
        name = projection_name(head)
        if not name:
            raise refusal(path, f"a head of the kind {head.spec.kind} has no projection")
        found[name] = ServedProjection(head, device)
    return found


def target_weights(path: str | Path) -> TargetWeights:
    """Read from a target's folder only the two matrices that a head shares with it.

    Raises OutriderError(INVALID_VALUE) if its safetensors files have no embeddings.
    """
    found: dict[str, torch.Tensor] = {}
    for file_path in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(file_path, framework="pt") as file:
                for name in {*_EMBEDDINGS, "lm_head.weight"} & set(file.keys()):
                    found[name] = file.get_tensor(name)
        except (OSError, SafetensorError) as cause:
            raise refusal(file_path, f"it cannot be read ({cause})") from cause
    embeddings = next((found[name] for name in _EMBEDDINGS if name in found), None)
    if embeddings is None:
        why = f"its target's folder has no weights {_EMBEDDINGS[0]} in safetensors files"
        raise refusal(path, why)
    return TargetWeights(embeddings, found.get("lm_head.weight", embeddings))
