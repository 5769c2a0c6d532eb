"""Records the scores that independent code gives for small random heads, one file for each case.

Run this script once, with the packages speculators, specforge, eagle-llm, medusa-llm and
recurrent_drafting (of Apple's ml-recurrent-drafter) on PYTHONPATH; the tests need none of these
packages. Each file has the head as that code saves it, a text, the text's features, and `lengths`.
For each length n the file has the scores of a few guesses after the text's first n tokens. In place
of its own guesses, the head is fed the text's next tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent
HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 16, 40, 24, 6
LENGTHS = [3, 9, 20]
LENGTH = 28
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "attn_implementation": "eager",
}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def text() -> torch.Tensor:
    return torch.randint(VOCAB, (LENGTH,))


def randomise(model: torch.nn.Module) -> None:
    """Set norms near 1, and all other weights so large that every part of the model counts."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name and "bias" not in name:
                parameter.copy_(1 + 0.3 * noise(*parameter.shape))
            else:
                scale = 1.0 if "embed" in name or "mask_hidden" in name else HIDDEN**-0.5
                parameter.copy_(scale * noise(*parameter.shape))
    model.eval()


def vocabulary_map() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    members = torch.zeros(VOCAB, dtype=torch.bool)
    members[ids] = True
    return members, ids - torch.arange(DRAFT_VOCAB)


def record(
    name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], **case: Any
) -> None:
    """Write a case; `case` has tokens, features, scores and perhaps more tensors."""
    lengths = torch.tensor(case.pop("lengths", LENGTHS))
    floats = {key: value.contiguous() for key, value in case.items()}
    head = {f"head/{key}": value.detach().clone().contiguous() for key, value in tensors.items()}
    path = FOLDER / f"{name}.safetensors"
    metadata = {"config": json.dumps(config)}
    save_file({**head, **floats, "lengths": lengths}, path, metadata)
    print(path.name, path.stat().st_size)


def saved(model: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the config and tensors of a speculators model, as the model would save them."""
    ignored = set(model._keys_to_ignore_on_save)
    tensors = {key: value for key, value in model.state_dict().items() if key not in ignored}
    return json.loads(model.config.to_json_string(use_diff=False)), tensors


def layer_config(kind: str = "llama", layers: int = 1, **more: Any) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    classes: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    return classes[kind](**SIZES, num_hidden_layers=layers, **more)


def eagle3(
    name: str, kind: str, layers: int, seed: int, window: dict[str, Any] | None = None, **flags: Any
) -> None:
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    torch.manual_seed(seed)
    more = window | {"layer_types": ["sliding_attention"]} if window else {}
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(kind, layers, **more),
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=[1, 3, 5],
        **flags,
    )
    model = Eagle3DraftModel(config)
    randomise(model)
    model.load_vocab_mappings(*vocabulary_map())
    tokens, features = text(), noise(LENGTH, 3 * HIDDEN)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out[0]))
    # In training a window stays in place while the head guesses, but in use it moves with the
    # guesses.
    steps = 1 if window else 3
    with torch.no_grad():
        model(
            hidden_states=features[None, :-1],
            input_ids=tokens[None, 1:],
            document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
            ttt_steps=steps,
        )
    scores = torch.stack([torch.stack([row[n - 2] for row in logits]) for n in LENGTHS])
    record(name, *saved(model), tokens=tokens, features=features, scores=scores)


def peagle(seed: int) -> None:
    import speculators.models.peagle.core as core
    from speculators.models.peagle.config import PEagleSpeculatorConfig

    torch.manual_seed(seed)
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layer_config("llama", 2),
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=[1, 3, 5],
        mask_token_id=7,
    )
    model = core.PEagleDraftModel(config)
    randomise(model)
    model.load_vocab_mappings(*vocabulary_map())
    tokens, features, steps = text(), noise(LENGTH, 3 * HIDDEN), 4
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out[0]))
    core.compute_metrics = lambda **unused: (None, None)
    scores = []
    for n in LENGTHS:
        last = n - 2
        anchors = torch.tensor([*range(last + 1), *[last] * (steps - 1)])
        depths = torch.tensor([0] * (last + 1) + list(range(1, steps)))
        core.generate_cod_sample_indices = lambda pair=(anchors, depths), **unused: pair
        with torch.no_grad():
            model(
                hidden_states=features[None, :-1],
                input_ids=tokens[None, 1:],
                document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
                verifier_last_hidden_states=noise(1, LENGTH - 1, HIDDEN),
            )
        scores.append(logits[-1][last:])
    values = {"tokens": tokens, "features": features, "scores": torch.stack(scores)}
    record("peagle", *saved(model), **values)


def blocks(name: str, kind: str, seed: int, layers: Any, **flags: Any) -> None:
    import speculators.models.dflash.core as dflash
    import speculators.models.dspark.core as dspark
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dspark.config import DSparkSpeculatorConfig

    torch.manual_seed(seed)
    module: Any = dflash if kind == "dflash" else dspark
    config_class = DFlashSpeculatorConfig if kind == "dflash" else DSparkSpeculatorConfig
    model_class = dflash.DFlashDraftModel if kind == "dflash" else dspark.DSparkDraftModel
    config = config_class(
        transformer_layer_config=layers,
        draft_vocab_size=DRAFT_VOCAB,
        aux_hidden_state_layer_ids=[1, 3, 5],
        mask_token_id=7,
        block_size=5,
        **flags,
    )
    model = model_class(config)
    randomise(model)
    model.load_vocab_mappings(*vocabulary_map())
    tokens, features = text(), noise(LENGTH, 3 * HIDDEN)
    anchors = torch.tensor(LENGTHS) - 1
    valid = torch.ones(len(LENGTHS), dtype=torch.bool)
    dflash.select_anchors = lambda *unused: (anchors, valid)
    found: dict[str, torch.Tensor] = {}

    def keep(logits: Any, targets: Any, *rest: Any, **unused: Any) -> tuple[None, None]:
        found["scores"] = logits.view(len(LENGTHS), 5, -1)
        if kind == "dspark" and rest[0] is not None:
            found["confidences"] = rest[0].view(len(LENGTHS), 5).sigmoid()
        return None, None

    module.compute_metrics = keep
    with torch.no_grad():
        model(
            hidden_states=features[None],
            input_ids=tokens[None],
            loss_mask=torch.ones(1, LENGTH),
            verifier_last_hidden_states=noise(1, LENGTH, HIDDEN),
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            max_anchors=len(LENGTHS),
        )
    first = 0 if config.sample_from_anchor else 1
    found = {key: value[:, first:] for key, value in found.items()}
    settings, tensors = saved(model)
    embeddings = {"embeddings": model.embed_tokens.weight.detach().clone()}
    record(name, settings, tensors, tokens=tokens, features=features, **embeddings, **found)


def blocks_by_specforge(seed: int) -> None:
    """Record DFlash with SpecForge's window, in z-lab's dialect."""
    from specforge.algorithms.common.dflash_family_model import create_dflash_sdpa_mask
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from transformers import Qwen3Config

    torch.manual_seed(seed)
    size = 5
    config = Qwen3Config(
        **SIZES,
        num_hidden_layers=2,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        block_size=size,
        num_target_layers=LAYERS,
        dflash_config={"mask_token_id": 7, "target_layer_ids": [0, 2, 4]},
        architectures=["DFlashDraftModel"],
    )
    model = DFlashDraftModel(config)
    randomise(model)
    tokens, features = text(), noise(LENGTH, 3 * HIDDEN)
    embeddings, lm_head = noise(VOCAB, HIDDEN), noise(VOCAB, HIDDEN) / 4
    anchors = torch.tensor(LENGTHS) - 1
    ids = torch.full((len(LENGTHS), size), 7)
    ids[:, 0] = tokens[anchors]
    places = anchors[:, None] + torch.arange(size)
    valid = torch.ones(1, len(LENGTHS), dtype=torch.bool)
    masks = {
        kind: create_dflash_sdpa_mask(
            anchors[None], valid, LENGTH, size, torch.device("cpu"), window
        )
        for kind, window in (("sliding_attention", 6), ("full_attention", None))
    }
    with torch.no_grad():
        out = model(
            position_ids=torch.cat((torch.arange(LENGTH), places.flatten()))[None],
            attention_mask=masks,
            noise_embedding=embeddings[ids.flatten()][None],
            target_hidden=features[None],
        )
    scores = out[0].view(len(LENGTHS), size, -1)[:, 1:] @ lm_head.T
    values = {"tokens": tokens, "features": features, "scores": scores}
    settings = json.loads(config.to_json_string(use_diff=False))
    tensors = dict(model.state_dict())
    record("dflash-specforge", settings, tensors, embeddings=embeddings, lm_head=lm_head, **values)


def eagle3_by_specforge(name: str, seed: int, **flags: Any) -> None:
    """Record an EAGLE-3 head as SpecForge trains it: each step is a pass over the whole text."""
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        **SIZES | {"pad_token_id": 0},
        num_hidden_layers=1,
        draft_vocab_size=DRAFT_VOCAB,
        architectures=["LlamaForCausalLMEagle3"],
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
        **flags,
    )
    model = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    randomise(model)
    members, offsets = vocabulary_map()
    model.t2d.copy_(members)
    model.d2t.copy_(offsets)
    tokens, features, rows = text(), noise(LENGTH, 3 * HIDDEN), LENGTH - 1
    cache: list[list[torch.Tensor]] = [[], []]
    logits = []
    with torch.no_grad():
        states = model.project_hidden_states(features[None, :-1])
        mask = model.prepare_decoder_attention_mask(
            attention_mask=torch.ones(1, rows, dtype=torch.bool),
            hidden_states=states,
            batch_size=1,
            seq_length=rows,
            past_key_values_length=0,
        )
        for step in range(3):
            ids = torch.cat((tokens[1 + step :], tokens.new_zeros(step)))
            states = model.backbone(
                input_embeds=model.embed_input_ids(ids[None]),
                hidden_states=states,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=torch.arange(rows)[None],
            )
            logits.append(model.compute_logits(states)[0])
    scores = torch.stack([torch.stack([row[n - 2] for row in logits]) for n in LENGTHS])
    settings = json.loads(config.to_json_string(use_diff=False))
    values = {"tokens": tokens, "features": features, "scores": scores}
    record(name, settings, dict(model.state_dict()), **values)


def mtp(seed: int) -> None:
    """Record MiMo-7B's layer: speculators' MTP layer around transformers' Qwen2 layer.

    Speculators' layer has the embedding first in the joined input. MiMo's layer has the embedding
    last, so the columns of input_proj change places.
    """
    from speculators.models.mtp.model_definitions import _create_mtp_layer_class
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import (
        Qwen2DecoderLayer,
        Qwen2RMSNorm,
        Qwen2RotaryEmbedding,
    )

    torch.manual_seed(seed)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = Qwen2Config(**sizes | {"num_attention_heads": 2}, num_hidden_layers=LAYERS)
    layer = _create_mtp_layer_class("Layer", Qwen2DecoderLayer, Qwen2RMSNorm)(config, 0)
    randomise(layer)
    rotary = Qwen2RotaryEmbedding(config)
    tokens, features, steps = text(), noise(LENGTH, HIDDEN), 3
    embeddings, lm_head = noise(VOCAB, HIDDEN), noise(VOCAB, HIDDEN) / 4
    scores = []
    for n in LENGTHS:
        states = features[: n - 1]
        row = []
        for step in range(steps):
            rows = n - 1 + step
            mask = torch.full((rows, rows), -torch.inf).triu(1)[None, None]
            positions = torch.arange(rows)[None]
            with torch.no_grad():
                out = layer(
                    hidden_states=states[None],
                    token_embeddings=embeddings[tokens[1 : rows + 1]][None],
                    attention_mask=mask,
                    position_ids=positions,
                    position_embeddings=rotary(states, positions),
                )[0]
            row.append(out[-1] @ lm_head.T)
            states = torch.cat((states, out[-1:]))
        scores.append(torch.stack(row))
    tensors = {f"model.mtp_layers.0.{key}": value for key, value in layer.state_dict().items()}
    name = "model.mtp_layers.0.input_proj.weight"
    tensors[name] = tensors[name].roll(HIDDEN, dims=1)
    settings = config.to_dict() | {"model_type": "mimo", "num_nextn_predict_layers": 1}
    values = {"tokens": tokens, "features": features, "scores": torch.stack(scores)}
    record("mtp", settings, tensors, embeddings=embeddings, lm_head=lm_head, **values)


def eagle(seed: int) -> None:
    """Record EAGLE-1 with SafeAILab's forward, without a cache."""
    from eagle.model.cnets import Model
    from eagle.model.configs import EConfig

    torch.manual_seed(seed)
    sizes = SIZES | {"num_key_value_heads": 4, "pad_token_id": 0}
    del sizes["attn_implementation"]
    sizes["head_dim"] = HIDDEN // 4
    config = EConfig(**sizes, num_hidden_layers=1, hidden_act="silu")
    # When SafeAILab wrote its code, transformers' configs did not always state a scaling.
    config.rope_scaling = None
    model = Model(config, bias=True)
    randomise(model)
    tokens, features, steps = text(), noise(LENGTH, HIDDEN), 3
    lm_head = noise(VOCAB, HIDDEN) / 4
    scores = []
    for n in LENGTHS:
        states, row = features[: n - 1], []
        for step in range(steps):
            ids = tokens[1 : n + step][None]
            with torch.no_grad():
                out = model(states[None], input_ids=ids)[0]
            row.append(out[-1] @ lm_head.T)
            states = torch.cat((states, out[-1:]))
        scores.append(torch.stack(row))
    settings = sizes | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": True}
    values = {"tokens": tokens, "features": features, "scores": torch.stack(scores)}
    record("eagle", settings, dict(model.state_dict()), lm_head=lm_head, **values)


def medusa(seed: int) -> None:
    """Record Medusa's heads, made of Medusa's ResBlock."""
    from medusa.model.medusa_model import ResBlock
    from torch.nn import Linear, ModuleList, Sequential

    torch.manual_seed(seed)
    heads = ModuleList(
        Sequential(ResBlock(HIDDEN), Linear(HIDDEN, VOCAB, bias=False)) for _ in range(3)
    )
    randomise(heads)
    tokens, features = text(), noise(LENGTH, HIDDEN)
    with torch.no_grad():
        scores = torch.stack([torch.stack([h(features[n - 2]) for h in heads]) for n in LENGTHS])
    settings = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    values = {"tokens": tokens, "features": features, "scores": scores}
    record("medusa", settings, heads.state_dict(), **values)


def redrafter(name: str, seed: int, **sizes: Any) -> None:
    """Record ReDrafter with Apple's beam search; the text goes on with the likeliest guesses.

    The file also has the beams of a search of width 3, and the log probability of each beam. With
    this seed each search finds the chain as one of its paths. Our tree always has the chain.
    """
    from recurrent_drafting.configuration_drafter import DrafterConfig
    from recurrent_drafting.modeling_drafter import BeamShape, Drafter

    torch.manual_seed(seed)
    config = DrafterConfig(vocab_size=VOCAB, hidden_size=HIDDEN, **sizes)
    model = Drafter(config)
    randomise(model)
    embeddings = torch.nn.Embedding(VOCAB, HIDDEN)
    tokens, features, steps = text(), noise(LENGTH, HIDDEN), 4
    logits: list[torch.Tensor] = []
    scores, beams, beam_scores = [], [], []
    for n in LENGTHS:
        case = features[n - 2][None], tokens[n - 1 : n], embeddings
        with torch.no_grad():
            hook = model.lm_head.register_forward_hook(lambda m, i, out: logits.append(out[0, 0]))
            chain, _ = model.beam_search_candidates(*case, BeamShape(1, steps + 1))
            hook.remove()
            found, shares = model.beam_search_candidates(*case, BeamShape(3, steps + 1))
        if not (found[0] == chain[0]).all(-1).any():
            raise ValueError(f"{seed} is no such seed")
        tokens[n : n + steps] = chain[0, 0, 1:]
        scores.append(torch.stack(logits[-steps:]))
        beams.append(found[0, :, 1:])
        beam_scores.append(shares[0].gather(-1, found[0, :, 1:, None]).sum((-2, -1)))
    values = {
        "tokens": tokens,
        "features": features,
        "scores": torch.stack(scores),
        "beams": torch.stack(beams),
        "beam_scores": torch.stack(beam_scores),
        "embeddings": embeddings.weight.detach(),
    }
    record(name, json.loads(config.to_json_string()), model.state_dict(), **values)


def main() -> None:
    cases: dict[str, Any] = {
        "eagle3": lambda: eagle3("eagle3", "llama", 1, 1, norm_before_residual=True),
        "eagle3-1": lambda: eagle3(
            "eagle3-1", "qwen3", 2, 2, fc_norm=True, norm_output=True, norm_before_residual=False
        ),
        "eagle3-row-norm": lambda: eagle3("eagle3-row-norm", "llama", 1, 3, norm_before_fc=True),
        "peagle": lambda: peagle(4),
        "dflash": lambda: blocks("dflash", "dflash", 5, layer_config("qwen3", 2)),
        "dflash-window": lambda: blocks(
            "dflash-window",
            "dflash",
            6,
            layer_config(
                "qwen3",
                2,
                use_sliding_window=True,
                sliding_window=6,
                layer_types=["sliding_attention", "full_attention"],
            ),
        ),
        "dspark": lambda: blocks("dspark", "dspark", 7, layer_config("qwen3", 1), markov_rank=4),
        "dspark-gated": lambda: blocks(
            "dspark-gated",
            "dspark",
            8,
            layer_config("qwen3", 1),
            markov_rank=4,
            markov_head_type="gated",
            sample_from_anchor=False,
            confidence_head_with_markov=False,
        ),
        "dspark-rnn": lambda: blocks(
            "dspark-rnn",
            "dspark",
            9,
            layer_config("qwen3", 1),
            markov_rank=4,
            markov_head_type="rnn",
            enable_confidence_head=False,
        ),
        "dflash-specforge": lambda: blocks_by_specforge(13),
        "eagle3-specforge": lambda: eagle3_by_specforge("eagle3-specforge", 14, fc_norm=True),
        "eagle3-1-specforge": lambda: eagle3_by_specforge(
            "eagle3-1-specforge", 16, fc_norm=True, norm_output=True
        ),
        "eagle3-no-norm-specforge": lambda: eagle3_by_specforge(
            "eagle3-no-norm-specforge", 17, norm_output=False
        ),
        "eagle3-yarn-specforge": lambda: eagle3_by_specforge(
            "eagle3-yarn-specforge",
            18,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 4,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.7,
                "mscale_all_dim": 0.0,
            },
        ),
        "eagle3-window": lambda: eagle3(
            "eagle3-window", "qwen3", 1, 15, {"sliding_window": 6, "use_sliding_window": True}
        ),
        "mtp": lambda: mtp(10),
        "eagle": lambda: eagle(11),
        "medusa": lambda: medusa(12),
        "redrafter": lambda: redrafter(
            "redrafter", 21, exit_dim=2 * HIDDEN, num_draft_layers=1, rnn=True
        ),
        "redrafter-sum": lambda: redrafter(
            "redrafter-sum", 19, exit_dim=24, num_draft_layers=2, rnn=False
        ),
    }
    for name in sys.argv[1:] or cases:
        cases[name]()


if __name__ == "__main__":
    main()
