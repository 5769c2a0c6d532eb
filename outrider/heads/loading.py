"""Makes a runnable model of a head in normal form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from outrider.errors import invalid
from outrider.heads.files import open_tensors, read_index
from outrider.heads.kinds.dflash import DFlash
from outrider.heads.kinds.dspark import DSpark
from outrider.heads.kinds.eagle import Eagle
from outrider.heads.kinds.eagle3 import Eagle3
from outrider.heads.kinds.medusa import Medusa
from outrider.heads.kinds.mtp import Mtp
from outrider.heads.kinds.peagle import PEagle
from outrider.heads.kinds.redrafter import ReDrafter
from outrider.heads.model import HeadModel, TargetWeights
from outrider.heads.projection import ServedProjection, projection_name
from outrider.heads.reading import read, read_target_config
from outrider.heads.spec import Head, Kind, refusal
from outrider.tokenizer import model_file

_KINDS: dict[Kind, type[HeadModel]] = {
    "eagle3": Eagle3,
    "peagle": PEagle,
    "eagle": Eagle,
    "dflash": DFlash,
    "dspark": DSpark,
    "mtp": Mtp,
    "medusa": Medusa,
    "redrafter": ReDrafter,
}
# In vision models, the names of the language model's weights have a prefix.
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
_LM_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_SHARED = {*_EMBEDDINGS, *_LM_HEADS}
_SINGLE = "model.safetensors"


def load(
    head: Head,
    target: TargetWeights,
    *,
    page_count: int,
    page_size: int = 16,
    batch_rows: int = 1024,
    dtype: torch.dtype = torch.float32,
    int8: bool = False,
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
        int8=int8,
        device=device,
    )
    return model.eval()


def load_projections(
    paths: Sequence[str], target: str, device: torch.device, *, trust_remote_code: bool = False
) -> dict[str, ServedProjection]:
    """Read the projections of heads for a target, keyed by name.

    Raises OutriderError(INVALID_VALUE) for a folder that is no head of the target, or a head
    without a projection.
    """
    found = {}
    config = read_target_config(target, trust_remote_code) if paths else None
    for path in paths:
        head = read(path, config)
        name = projection_name(head)
        if not name:
            raise refusal(path, f"a head of the kind {head.spec.kind} has no projection")
        found[name] = ServedProjection(head, device)
    return found


def target_weights(target: str | Path) -> TargetWeights:
    """Read only the two matrices of a target that a head may share with it.

    `target` is a directory or hub id. Raises OutriderError(INVALID_VALUE) if its safetensors files
    have no embeddings or cannot be read, and OutriderError(MODEL_NOT_FOUND) if there is no such
    target.
    """
    found: dict[str, torch.Tensor] = {}
    for path in _files_of(str(target)):
        with open_tensors(path, "target") as file:
            for name in _SHARED & set(file.keys()):
                found[name] = file.get_tensor(name)
    embeddings = _first(found, _EMBEDDINGS)
    if embeddings is None:
        why = f"has no weights {_EMBEDDINGS[0]} in safetensors files, which a head shares with it"
        raise invalid("target", f"{target} {why}")
    matrix = _first(found, _LM_HEADS)
    return TargetWeights(embeddings, embeddings if matrix is None else matrix)


def _first(found: Mapping[str, torch.Tensor], names: Sequence[str]) -> torch.Tensor | None:
    return next((found[name] for name in names if name in found), None)


def _files_of(target: str) -> list[Path]:
    """Return the target's safetensors files that may have the shared matrices.

    From the hub, only the files that the target's index names for these matrices are fetched.
    """
    index = model_file(target, f"{_SINGLE}.index.json")
    if index is not None:
        places = read_index(index, "target")
        return [_shard(target, places[name], index) for name in sorted(_SHARED & set(places))]
    if Path(target).is_dir():
        return sorted(Path(target).glob("*.safetensors"))
    path = model_file(target, _SINGLE)
    return [] if path is None else [path]


def _shard(target: str, name: str, index: Path) -> Path:
    path = model_file(target, name)
    if path is None:
        why = f"{target} lacks {name}, which {index.name} names; download the checkpoint again"
        raise invalid("target", why)
    return path
