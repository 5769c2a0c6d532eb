"""Builds random heads with speculators' classes, and records the scores that they give.

    build/speculators/bin/python -m tests.heads.by_speculators.make_heads FOLDER

writes a folder for each case: the head as its `save_pretrained` writes it, and
reference.safetensors with a text, its features, the target's matrices, and the scores of a few
guesses after the text's first n tokens, for each n of `LENGTHS`. In place of its own guesses, the
head is fed the text's next tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import speculators.models.dflash.core as dflash
import speculators.models.dspark.core as dspark
import speculators.models.eagle3.core as eagle3
import speculators.models.peagle.core as peagle
import torch
from safetensors.torch import save_file
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dspark.config import DSparkSpeculatorConfig
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.rotary_partial import install_partial_neox_rotary
from speculators.models.peagle.config import PEagleSpeculatorConfig
from transformers import LlamaConfig, Qwen3Config

from tests.heads.speculators_cases import (
    BLOCK,
    CASES,
    DRAFT_VOCAB,
    HIDDEN,
    LENGTH,
    LENGTHS,
    MASK,
    STATES,
    STEPS,
    VOCAB,
    Case,
)

Values = dict[str, torch.Tensor]


def layers_of(case: Case) -> Any:
    """Return the config of the head's layers."""
    classes: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    return classes[case.type](
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=case.layer_count,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        pad_token_id=None,
        attn_implementation="eager",
        **case.layers,
    )


def made(model_class: Any, config_class: Any, case: Case, **defaults: Any) -> Any:
    """Return a model with random weights, which are so large that every part matters.

    Norms are near 1.
    """
    settings = {"draft_vocab_size": DRAFT_VOCAB, **defaults, **case.config}
    model = model_class(config_class(transformer_layer_config=layers_of(case), **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name and "bias" not in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape))
            else:
                scale = 1.0 if "embed" in name or "mask_hidden" in name else HIDDEN**-0.5
                parameter.copy_(scale * torch.randn(parameter.shape))
    if settings["draft_vocab_size"] < VOCAB:
        ids = torch.randperm(VOCAB)[: settings["draft_vocab_size"]].sort().values
        members = torch.zeros(VOCAB, dtype=torch.bool)
        members[ids] = True
        model.load_vocab_mappings(members, ids - torch.arange(len(ids)))
    return model.eval()


def text_for(model: Any) -> Values:
    """Return a random text and its features."""
    tokens = torch.randint(VOCAB, (LENGTH,))
    return {"tokens": tokens, "features": torch.randn(LENGTH, model.fc.in_features)}


def documents(length: int) -> torch.Tensor:
    """Give the whole text as one document."""
    return torch.zeros(1, length, dtype=torch.long)


def run_eagle3(case: Case) -> tuple[Any, Values]:
    """Run EAGLE-3: each step is a pass over the whole text.

    Row n - 2 of a pass guesses what follows the first n tokens.
    """
    model = made(
        eagle3.Eagle3DraftModel,
        Eagle3SpeculatorConfig,
        case,
        eagle_aux_hidden_state_layer_ids=STATES,
    )
    values = text_for(model)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out[0]))
    # In training a window stays in place while the head guesses, but in use it moves along.
    steps = 1 if "sliding_window" in case.layers else STEPS
    model(
        hidden_states=values["features"][None, :-1],
        input_ids=values["tokens"][None, 1:],
        document_ids=documents(LENGTH - 1),
        ttt_steps=steps,
    )
    scores = torch.stack([torch.stack([row[n - 2] for row in logits]) for n in LENGTHS])
    return model, values | {"scores": scores}


def run_peagle(case: Case) -> tuple[Any, Values]:
    """Return the model, and for each context the scores of one pass.

    The scores are those of the pass's last `STEPS` rows, which are its last token at each depth.
    """
    model = made(
        peagle.PEagleDraftModel,
        PEagleSpeculatorConfig,
        case,
        eagle_aux_hidden_state_layer_ids=STATES,
        mask_token_id=MASK,
    )
    values = text_for(model)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out[0]))
    scores = []
    for n in LENGTHS:
        last = n - 2
        anchors = torch.tensor([*range(last + 1), *[last] * (STEPS - 1)])
        depths = torch.tensor([0] * (last + 1) + list(range(1, STEPS)))
        peagle.generate_cod_sample_indices = lambda pair=(anchors, depths), **unused: pair
        model(
            hidden_states=values["features"][None, :-1],
            input_ids=values["tokens"][None, 1:],
            document_ids=documents(LENGTH - 1),
            verifier_last_hidden_states=torch.randn(1, LENGTH - 1, HIDDEN),
        )
        scores.append(logits[-1][last:])
    return model, values | {"scores": torch.stack(scores)}


def run_blocks(case: Case) -> tuple[Any, Values]:
    """Return the model, and the scores of a single pass that has a block after each context."""
    of_dspark = case.kind == "dspark"
    module: Any = dspark if of_dspark else dflash
    model = made(
        dspark.DSparkDraftModel if of_dspark else dflash.DFlashDraftModel,
        DSparkSpeculatorConfig if of_dspark else DFlashSpeculatorConfig,
        case,
    )
    values = text_for(model)
    anchors, count = torch.tensor(LENGTHS) - 1, len(LENGTHS)
    valid = torch.ones(count, dtype=torch.bool)
    dflash.select_anchors = lambda *unused: (anchors, valid)
    found: Values = {}

    def keep(logits: Any, targets: Any, *rest: Any, **unused: Any) -> tuple[None, None]:
        found["scores"] = logits.view(count, BLOCK, -1)
        if of_dspark and rest[0] is not None:
            found["confidences"] = rest[0].view(count, BLOCK).sigmoid()
        return None, None

    module.compute_metrics = keep
    model(
        hidden_states=values["features"][None],
        input_ids=values["tokens"][None],
        loss_mask=torch.ones(1, LENGTH),
        verifier_last_hidden_states=torch.randn(1, LENGTH, HIDDEN),
        document_ids=documents(LENGTH),
        max_anchors=count,
    )
    first = 0 if model.config.sample_from_anchor else 1
    return model, values | {name: value[:, first:] for name, value in found.items()}


RUNS = {"eagle3": run_eagle3, "peagle": run_peagle, "dflash": run_blocks, "dspark": run_blocks}


def main() -> None:
    """Write all cases."""
    # Speculators' training does this too.
    install_partial_neox_rotary()
    peagle.compute_metrics = lambda **unused: (None, None)
    torch.set_num_threads(1)
    for seed, (name, case) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        with torch.no_grad():
            model, values = RUNS[case.kind](case)
        folder = Path(sys.argv[1]) / name
        model.save_pretrained(folder / "head")
        # The matrices that a head may share with its target.
        values["embeddings"] = model.embed_tokens.weight
        if len(model.lm_head.weight) == VOCAB:
            values["lm_head"] = model.lm_head.weight
        tensors = {key: value.detach().clone().contiguous() for key, value in values.items()}
        save_file(tensors, folder / "reference.safetensors")


if __name__ == "__main__":
    main()
