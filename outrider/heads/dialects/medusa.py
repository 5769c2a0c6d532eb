"""Medusa: heads of residual blocks on the target's final state."""

from __future__ import annotations

from outrider.heads.files import Keys, Weights
from outrider.heads.spec import Head, HeadSpec, TargetShape, refusal


def read_medusa(keys: Keys, weights: Weights, target: TargetShape) -> Head:
    """Bring Medusa's heads to the normal form. Raises OutriderError(INVALID_VALUE).

    The weights tell how many heads there are: the key medusa_num_heads of published files is often
    wrong. Heads without a matrix of their own for the scores share the target's lm_head.
    """
    weights.rename(lambda name: name.removeprefix("medusa_head."))
    hidden = target.hidden_size
    numbers = {name.split(".")[0] for name in weights.names}
    # `finish` names the weights of a number that leaves a gap.
    count = next(i for i in range(len(numbers) + 1) if str(i) not in numbers)
    if not count:
        raise refusal(weights.path, "it has no weights 0.*, those of a first head")
    blocks = keys.integer("medusa_num_layers", 1, least=0)
    own = f"0.{blocks}.weight" in weights
    for i in range(count):
        for j in range(blocks):
            weights.take(f"{i}.{j}.linear.weight", hidden, hidden, to=f"heads.{i}.{j}.weight")
            weights.take(f"{i}.{j}.linear.bias", hidden, to=f"heads.{i}.{j}.bias")
        if own:
            name = f"{i}.{blocks}.weight"
            weights.take(name, target.vocab_size, hidden, to=f"outputs.{i}.weight")
    spec = HeadSpec(
        kind="medusa",
        target=target,
        draft_vocab_size=target.vocab_size,
        boundaries=(),
        final_state=True,
        block_counts=(blocks,) * count,
    )
    return Head(spec, weights.finish())
