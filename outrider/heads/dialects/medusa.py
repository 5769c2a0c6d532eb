"""Medusa: heads of residual blocks on the target's final state. Reads Medusa's and vLLM's files."""

from __future__ import annotations

import re

import torch

from outrider.heads.dialects.decoder import other_vocabulary
from outrider.heads.files import Keys, Weights
from outrider.heads.spec import Head, HeadSpec, TargetShape, refusal


def read_medusa(keys: Keys, weights: Weights, target: TargetShape) -> Head:
    """Return Medusa's heads in the normal form. Raises OutriderError(INVALID_VALUE).

    The weights tell how many heads there are: the key medusa_num_heads of published files is often
    wrong. Heads without a matrix of their own for the scores share the target's lm_head, or the
    file's.
    """
    layers = "medusa_num_layers" if "medusa_num_layers" in keys else "num_hidden_layers"
    blocks = keys.integer(layers, 1, least=0)
    if keys.number("logit_scale", 1.0) != 1.0:
        raise keys.wrong("logit_scale", "other than 1 is not supported")
    weights.rename(lambda name: _plain_name(name, blocks))
    hidden = target.hidden_size
    numbers = {name.split(".")[0] for name in weights.names}
    # If the heads' numbers have a gap, the weights after the gap are not taken, and `finish` names
    # them.
    count = next(i for i in range(len(numbers) + 1) if str(i) not in numbers)
    if not count:
        raise refusal(weights.path, "it has no weights 0.*, those of a first head")
    has_bias = "0.0.linear.bias" in weights
    for i in range(count):
        for j in range(blocks):
            weights.take(f"{i}.{j}.linear.weight", hidden, hidden, to=f"heads.{i}.{j}.weight")
            if has_bias:
                weights.take(f"{i}.{j}.linear.bias", hidden, to=f"heads.{i}.{j}.bias")
    ids = _token_map(keys, weights, target)
    _take_outputs(keys, weights, target, count, blocks, ids)
    spec = HeadSpec(
        kind="medusa",
        target=target,
        draft_vocab_size=target.vocab_size if ids is None else len(ids),
        aux_layers=(),
        final_state=True,
        join_bias=has_bias,
        block_counts=(blocks,) * count,
    )
    return Head(spec, weights.finish(), ids)


def _plain_name(name: str, blocks: int) -> str:
    """Return a tensor's name in Medusa's own files; vLLM's files name blocks and lm_heads."""
    name = re.sub(r"^medusa_heads?\.", "", name)
    name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
    return re.sub(r"^lm_heads\.(\d+)\.weight$", rf"\1.{blocks}.weight", name)


def _token_map(keys: Keys, weights: Weights, target: TargetShape) -> torch.Tensor | None:
    """Return the target ids of a reduced vocabulary, which vLLM's files list in token_map.

    Return None for the whole vocabulary.
    """
    if "token_map" not in weights:
        return None
    size = keys.integer("truncated_vocab_size", target.vocab_size, most=target.vocab_size)
    ids = weights.ids("token_map", size)
    assert ids is not None
    distinct = len(set(ids.tolist()))
    if ids.dtype is torch.bool or distinct != size:
        raise refusal(weights.path, f"token_map has {distinct} ids, not {size} different ones")
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        why = f"token_map has ids outside the target's 0 to {target.vocab_size - 1}"
        raise refusal(weights.path, why)
    return ids.long()


def _take_outputs(
    keys: Keys,
    weights: Weights,
    target: TargetShape,
    count: int,
    blocks: int,
    ids: torch.Tensor | None,
) -> None:
    """Take the matrices for the scores: all rows, or the rows `ids` of the whole vocabulary."""
    own = [f"{i}.{blocks}.weight" for i in range(count)]
    if keys.flag("original_lm_head", False) or "lm_head.weight" in weights:
        source = "lm_head.weight" if "lm_head.weight" in weights else own[0]
        names = {source: "lm_head.weight"}
        weights.skip(*(name for name in own if name != source))
    elif own[0] in weights or ids is not None:
        names = {name: f"outputs.{i}.weight" for i, name in enumerate(own)}
    else:
        names = {}
    for name, to in names.items():
        rows, wanted = weights.rows(name), target.vocab_size if ids is None else len(ids)
        if rows not in (wanted, target.vocab_size):
            raise other_vocabulary(keys, rows, target)
        weights.take(name, rows, target.hidden_size, to=to)
        if rows != wanted:
            weights.taken[to] = weights.taken[to][ids]
