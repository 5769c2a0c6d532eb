"""ReDrafter: the files of Apple's recurrent_drafting."""

from __future__ import annotations

from outrider.heads.dialects.decoder import other_vocabulary
from outrider.heads.files import Keys, Weights
from outrider.heads.spec import Head, HeadSpec, TargetShape

MODEL_TYPE = "recurrent_drafting_drafter"


def read_redrafter(keys: Keys, weights: Weights, target: TargetShape) -> Head:
    """Bring a ReDrafter to the normal form. Raises OutriderError(INVALID_VALUE)."""
    hidden, vocab_size = target.hidden_size, target.vocab_size
    if (found := keys.integer("hidden_size")) != hidden:
        raise keys.wrong("hidden_size", f"is {found}, but the target's is {hidden}")
    if (found := keys.integer("vocab_size")) != vocab_size:
        raise other_vocabulary(keys, found, target)
    size = keys.integer("exit_dim")
    blocks = keys.integer("num_draft_layers", least=0)
    if size != 2 * hidden:
        weights.take("input_proj.weight", size, 2 * hidden)
        weights.take("input_proj.bias", size)
    for i in range(blocks):
        weights.take(f"lm_head.{i}.linear.weight", size, size, to=f"blocks.{i}.weight")
        weights.take(f"lm_head.{i}.linear.bias", size, to=f"blocks.{i}.bias")
    weights.take(f"lm_head.{blocks}.weight", vocab_size, size, to="lm_head.weight")
    if keys.flag("rnn", False):
        weights.take("rnn_u.weight", hidden, hidden)
        weights.take("rnn_u.bias", hidden)
        weights.take("rnn_w.weight", hidden, hidden)
    spec = HeadSpec(
        kind="redrafter",
        target=target,
        draft_vocab_size=vocab_size,
        aux_layers=(),
        final_state=True,
        block_counts=(blocks,),
    )
    return Head(spec, weights.finish())
