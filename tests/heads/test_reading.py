"""The loader converts every dialect of a head to one normal form, and refuses all other files."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import OutriderError, Reason
from outrider.heads.loading import load
from outrider.heads.model import TargetWeights
from outrider.heads.reading import read
from outrider.heads.spec import Head
from tests.heads import head_files
from tests.heads.head_files import DIALECTS, LAYERS, TARGET, VOCAB, Files, write

SEVERAL = [(kind, dialect) for kind, dialects in DIALECTS.items() for dialect in list(dialects)[1:]]


def same(one: Head, other: Head) -> bool:
    """Return whether two heads compute the same, each by the first interpretation of its file."""
    specs = [replace(head.spec, other_aux_layers=()) for head in (one, other)]
    if specs[0] != specs[1] or one.tensors.keys() != other.tensors.keys():
        return False
    if (one.target_ids is None) != (other.target_ids is None):
        return False
    maps = [head.target_ids for head in (one, other) if head.target_ids is not None]
    return all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors) and (
        not maps or torch.equal(*maps)
    )


@pytest.mark.parametrize(("kind", "dialect"), SEVERAL)
def test_dialects_of_a_head_have_one_normal_form(kind: str, dialect: str, tmp_path: Path) -> None:
    first = next(iter(DIALECTS[kind].values()))
    expected = read(write(tmp_path / "first", first()), TARGET)
    found = read(write(tmp_path / "second", DIALECTS[kind][dialect]()), TARGET)
    assert found.spec.kind == kind
    assert same(found, expected)


@pytest.mark.parametrize("kind", DIALECTS)
def test_a_kind_is_told_by_its_files(kind: str, tmp_path: Path) -> None:
    head = read(write(tmp_path, next(iter(DIALECTS[kind].values()))()), TARGET)
    assert head.spec.kind == kind


def test_the_vocabulary_map_is_of_target_ids(tmp_path: Path) -> None:
    config, tensors = head_files.eagle3_speculators()
    head = read(write(tmp_path, (config, tensors)), TARGET)
    assert head.target_ids is not None
    assert head.target_ids.tolist() == tensors["t2d"].nonzero().flatten().tolist()


def test_a_short_trained_context_is_lifted_to_the_targets(tmp_path: Path) -> None:
    head = read(write(tmp_path, head_files.eagle3_specforge()), TARGET)
    assert head_files.TOP_LEVEL["max_position_embeddings"] < 64
    assert head.spec.target.context_length == head_files.CONTEXT


@pytest.mark.parametrize(
    ("files", "first", "others"),
    [
        (head_files.eagle3_safeailab, (2, 5, 7), ()),
        (head_files.eagle3_modelopt, (2, 5, 7), ((1, 4, 6),)),
        (head_files.eagle3_speculators, (2, 5, 7), ((3, 6, 8),)),
        (head_files.dflash_zlab, (2, 5, 7), ((1, 4, 6),)),
        (head_files.dflash_speculators, (2, 5, 7), ((3, 6, 8),)),
    ],
)
def test_what_layer_ids_may_mean_is_kept(
    files: Callable[[], Files], first: Any, others: Any, tmp_path: Path
) -> None:
    spec = read(write(tmp_path, files()), TARGET).spec
    assert (spec.aux_layers, spec.other_aux_layers) == (first, others)


def test_layers_that_the_user_sets_leave_no_other(tmp_path: Path) -> None:
    spec = read(write(tmp_path, head_files.eagle3_modelopt()), TARGET, (1, 5, 10)).spec
    assert (spec.aux_layers, spec.other_aux_layers) == ((1, 5, 10), ())


@pytest.mark.parametrize(
    ("files", "value"),
    [
        (head_files.dspark_deepspec, True),
        (head_files.dspark_specforge, True),
        (head_files.dspark_speculators, False),
        (head_files.dflash_zlab, False),
        (head_files.dflash_speculators, False),
    ],
)
def test_without_its_key_the_anchor_predicts_in_deepspecs_files_only(
    files: Callable[[], Files], value: bool, tmp_path: Path
) -> None:
    config, tensors = files()
    config.pop("sample_from_anchor", None)
    assert read(write(tmp_path, (config, tensors)), TARGET).spec.anchor_predicts is value


@pytest.mark.parametrize(("kind", "value"), [("eagle3", True), ("peagle", False)])
def test_without_its_key_the_residual_is_normed_in_speculators_eagle3_only(
    kind: str, value: bool, tmp_path: Path
) -> None:
    config, tensors = DIALECTS[kind]["speculators"]()
    config.pop("norm_before_residual", None)
    assert read(write(tmp_path, (config, tensors)), TARGET).spec.residual_normed is value


def test_norm_output_recycles_in_files_of_eagle_3_1_only(tmp_path: Path) -> None:
    config, tensors = head_files.eagle3_specforge()
    assert config["norm_output"] is True
    assert not read(write(tmp_path / "3", (config, tensors)), TARGET).spec.recycle_normed
    norms = {f"fc_norm.{i}.weight": torch.ones(head_files.TARGET_HIDDEN) for i in range(3)}
    newer = config | {"fc_norm": True}, tensors | norms
    assert read(write(tmp_path / "3.1", newer), TARGET).spec.recycle_normed


def test_a_head_without_fc_reads_the_final_state(tmp_path: Path) -> None:
    config, tensors = head_files.eagle3_modelopt()
    config["eagle_config"] = {"use_aux_hidden_state": False}
    del tensors["fc.weight"]
    spec = read(write(tmp_path, (config, tensors)), TARGET).spec
    assert (spec.aux_layers, spec.final_state, spec.feature_width) == ((), True, 16)


def test_medusas_weights_tell_how_many_heads_there_are(tmp_path: Path) -> None:
    config, tensors = head_files.medusa_official()
    assert config["medusa_num_heads"] == 2
    assert read(write(tmp_path, (config, tensors)), TARGET).spec.block_counts == (1, 1, 1)


def test_a_medusa_without_matrices_for_the_scores_shares_the_targets(tmp_path: Path) -> None:
    head = read(write(tmp_path, head_files.medusa_sharing()), TARGET)
    assert head.spec.kind == "medusa"
    assert not [name for name in head.tensors if name.startswith("outputs.")]


def test_a_mask_embedding_stands_for_a_mask_token(tmp_path: Path) -> None:
    folder = write(tmp_path, head_files.dflash_zlab())
    save_file({"mask_embedding": torch.randn(16)}, folder / "mask_embedding.safetensors")
    head = read(folder, TARGET)
    assert head.spec.mask_token_id is None
    assert "mask_embedding" in head.tensors


def test_an_eagle_without_a_bias_needs_no_key(tmp_path: Path) -> None:
    config, tensors = head_files.eagle_safeailab()
    assert "bias" not in config
    assert read(write(tmp_path / "with", (config, tensors)), TARGET).spec.join_bias
    del tensors["fc.bias"]
    assert not read(write(tmp_path / "without", (config, tensors)), TARGET).spec.join_bias


def test_a_block_size_may_stand_among_dflashs_own_keys(tmp_path: Path) -> None:
    config, tensors = head_files.dflash_zlab()
    config["dflash_config"]["block_size"] = config.pop("block_size")
    assert read(write(tmp_path, (config, tensors)), TARGET).spec.block_size == head_files.BLOCK


@pytest.mark.parametrize(
    ("top", "own", "causal"),
    [
        ({}, {}, (False, True)),
        ({"is_causal": True}, {}, (True, True)),
        ({"is_causal": False}, {}, (False, False)),
        ({}, {"is_causal": True}, (True, True)),
        ({}, {"causal": True}, (True, True)),
        ({}, {"causal": False}, (False, False)),
        ({"is_causal": False}, {"causal": True}, (False, False)),
        ({"sliding_window_non_causal": True}, {}, (False, False)),
    ],
)
def test_a_file_may_say_that_all_layers_are_causal_or_none(
    top: Any, own: Any, causal: Any, tmp_path: Path
) -> None:
    config, tensors = head_files.dflash_zlab()
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
    config["dflash_config"] |= own
    assert (
        read(write(tmp_path, (config | kinds | top, tensors)), TARGET).spec.causal_layers == causal
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("more", "files", "expected"),
    [
        ({}, head_files.eagle3_specforge, {"truncate": True}),
        ({"truncate": False}, head_files.eagle3_specforge, {"truncate": False}),
        (
            {"mscale": 0.7, "mscale_all_dim": 0},
            head_files.eagle3_specforge,
            {"truncate": True, "attention_factor": 0.07 * math.log(4) + 1},
        ),
        ({"mscale": 0.7, "mscale_all_dim": 0}, head_files.eagle3_speculators, {"truncate": True}),
        (
            {"mscale": 0.7, "mscale_all_dim": 0.5},
            head_files.eagle3_speculators,
            {"truncate": True, "mscale": 0.7, "mscale_all_dim": 0.5},
        ),
    ],
)
def test_yarns_numbers_are_those_of_the_heads_own_code(
    more: Any, files: Callable[[], Files], expected: Any, tmp_path: Path
) -> None:
    config, tensors = files()
    config.get("transformer_layer_config", config)["rope_parameters"] = YARN | more
    decoder = read(write(tmp_path, (config, tensors)), TARGET).spec.decoder
    assert decoder is not None
    assert decoder.rope == pytest.approx(YARN | {"rope_theta": 10000.0} | expected)


@pytest.mark.parametrize(
    ("kind", "place", "sizes"),
    [
        # In these two cases the code that trains heads rotates all channels, and vLLM rotates some.
        ("default", "rope", [None, 8]),
        ("default", "top", [None, 8]),
        ("yarn", "rope", [8]),
        ("yarn", "top", [8]),
    ],
)
def test_the_channels_that_turn_are_those_of_the_heads_own_code_first(
    kind: str, place: str, sizes: Any, tmp_path: Path
) -> None:
    config, tensors = head_files.eagle3_speculators()
    layer = dict(config["transformer_layer_config"])
    rope = YARN if kind == "yarn" else {"rope_type": "default", "rope_theta": 5000.0}
    part = {"partial_rotary_factor": 0.5}
    layer |= (
        {"rope_parameters": rope | part} if place == "rope" else {"rope_parameters": rope} | part
    )
    config["transformer_layer_config"] = layer
    spec = read(write(tmp_path, (config, tensors)), TARGET, (2, 5, 7)).spec
    assert [form.decoder.rotary_size for form in spec.readings if form.decoder] == sizes


def test_pickles_beside_safetensors_are_left_alone(tmp_path: Path) -> None:
    folder = write(tmp_path, head_files.eagle3_speculators())
    names = (
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_0.pth",
    )
    for name in names:
        (folder / name).write_bytes(b"no tensors")
    assert read(folder, TARGET).spec.kind == "eagle3"


def test_mimos_mask_beside_safetensors_has_to_be_converted(tmp_path: Path) -> None:
    folder = write(tmp_path, head_files.dflash_zlab())
    (folder / "mask_embedding.pt").write_bytes(b"")
    assert_refused(folder, r"mask_embedding\.pt is pickled; `outrider convert-head")


def test_a_reduced_medusa_of_vllm_scores_the_tokens_of_its_map(tmp_path: Path) -> None:
    config, tensors = head_files.medusa_vllm()
    for i in range(3):
        del tensors[f"blocks.{i}.layers.0.bias"]
    kept = torch.tensor([5, 0, 39])
    config |= {"truncated_vocab_size": 3}
    head = read(write(tmp_path, (config, tensors | {"token_map": kept})), TARGET)
    assert head.target_ids is not None
    assert head.target_ids.tolist() == [5, 0, 39]
    assert torch.equal(head.tensors["outputs.1.weight"], tensors["lm_heads.1.weight"][kept])
    load(head, TargetWeights(torch.zeros(VOCAB, 16), torch.zeros(VOCAB, 16)), page_count=1)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
INDEX = "model.safetensors.index.json"


def write_index(folder: Path, name: str) -> None:
    """Write an index of safetensors files, in which one tensor is in the file `name`."""
    places = {"fc.weight": "model.safetensors", "norm.weight": name}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


# Changes to a good head's folder, and words of the error for the changed folder.
BROKEN_FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        r"config\.json cannot be read",
    ),
    "config is lists in lists": (
        lambda f: (f / "config.json").write_text("[" * 100_000),
        r"config\.json cannot be read",
    ),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[]"),
        "must be an object",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        r"no file \*\.safetensors",
    ),
    "cut weights": (
        lambda f: (f / "model.safetensors").write_bytes(b"\x10"),
        r"model\.safetensors cannot be read",
    ),
    "a pointer of Git LFS": (
        lambda f: (f / "model.safetensors").write_bytes(LFS_POINTER),
        r"model\.safetensors cannot be read: it is a pointer of Git LFS; run `git lfs pull`",
    ),
    "a shard that is missing": (
        lambda f: write_index(f, "model-00002-of-00002.safetensors"),
        r"-00002\.safetensors is missing, which model\.safetensors\.index\.json names",
    ),
    "an index that leads elsewhere": (
        lambda f: write_index(f, "../model.safetensors"),
        r"index\.json names '\.\./model\.safetensors', which is no file beside it",
    ),
    "an index without places": (
        lambda f: (f / INDEX).write_text("[]"),
        r"index\.json is no index of safetensors files",
    ),
    "pickled": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        r"pytorch_model\.bin is pickled; `outrider convert-head",
    ),
    "an adapter": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(b""),
        r"adapter_model\.safetensors lies beside it",
    ),
}


@pytest.mark.parametrize("name", BROKEN_FOLDERS)
def test_a_broken_folder_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    spoil, words = BROKEN_FOLDERS[name]
    read(write(tmp_path, head_files.eagle3_speculators()), TARGET)
    spoil(tmp_path)
    assert_refused(tmp_path, words)


def larger_map(size: int) -> dict[str, torch.Tensor]:
    """Return the tensors t2d and d2t of a head that drafts the last ids of `size` ids."""
    members = torch.arange(size) >= size - head_files.DRAFT_VOCAB
    ids = members.nonzero().flatten()
    return {"t2d": members, "d2t": ids - torch.arange(len(ids))}


# A good head, changes to its config and tensors, and words of the error for the changed head.
BROKEN: dict[str, tuple[Callable[[], Files], Callable[[Any, Any], Any], str]] = {
    "quantised by its config": (
        head_files.eagle3_modelopt,
        lambda c, t: c.update(quantization_config={"quant_method": "modelopt"}),
        "quantization_config says that its weights are quantised",
    ),
    "quantised weights": (
        head_files.eagle3_modelopt,
        lambda c, t: t.update({"norm.weight": torch.ones(16, dtype=torch.uint8)}),
        "norm.weight is quantised to uint8",
    ),
    "float64 weights": (
        head_files.eagle3_modelopt,
        lambda c, t: t.update({"norm.weight": torch.ones(16, dtype=torch.float64)}),
        "norm.weight is of the type float64; save it as float32, bfloat16 or float16",
    ),
    "unread weights": (
        head_files.eagle3_speculators,
        lambda c, t: t.update({"layers.0.self_attn.q_norm.bias": torch.ones(8)}),
        r"nothing in it reads the weights layers\.0\.self_attn\.q_norm\.bias",
    ),
    "a norm without its key": (
        head_files.eagle3_speculators,
        lambda c, t: t.update({"input_norm.weight": torch.ones(48)}),
        r"nothing in it reads the weights input_norm\.weight",
    ),
    "missing weights": (
        head_files.eagle3_safeailab,
        lambda c, t: t.pop("midlayer.hidden_norm.weight"),
        r"layers\.0\.hidden_norm\.weight are missing",
    ),
    "missing norms of queries": (
        head_files.dflash_zlab,
        lambda c, t: [t.pop(k) for k in list(t) if "q_norm" in k],
        r"layers\.0\.self_attn\.q_norm\.weight are missing",
    ),
    "fc of another target": (
        head_files.eagle3_speculators,
        lambda c, t: t.update({"fc.weight": torch.ones(16, 50)}),
        "fc.weight reads 50 numbers a token, which is no multiple of the target's hidden size 16",
    ),
    "another count of layers": (
        head_files.eagle3_speculators,
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 5]),
        r"layers are \[1, 5\], but fc reads 3",
    ),
    "layers behind the target's": (
        head_files.eagle3_speculators,
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 5, LAYERS + 1]),
        r"layers are \[1, 5, 11\], but the target has the auxiliary layers 0 to 10",
    ),
    "layers that repeat": (
        head_files.eagle3_speculators,
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 5, 5]),
        r"layers are \[1, 5, 5\], which repeat",
    ),
    "a wide layer": (
        head_files.eagle3_speculators,
        lambda c, t: t.update({"layers.0.self_attn.q_proj.weight": torch.ones(64, 16)}),
        r"q_proj\.weight has the shape \[64, 16\], not \[64, 32\]",
    ),
    "not finite": (
        head_files.eagle3_speculators,
        lambda c, t: t["norm.weight"].fill_(torch.nan),
        "norm.weight has numbers that are not finite",
    ),
    "another target's width": (
        head_files.eagle3_angelslim,
        lambda c, t: c.update(target_hidden_size=32),
        "target_hidden_size is 32, but the target's hidden size is 16",
    ),
    "a smaller vocabulary than the target's": (
        head_files.eagle3_safeailab,
        lambda c, t: c.update(vocab_size=39),
        "vocab_size is 39, but the target has 40 tokens; name the target that the head was made",
    ),
    "a larger vocabulary than the target's": (
        head_files.dflash_zlab,
        lambda c, t: c.update(vocab_size=44),
        "vocab_size is 44, but the target has 40 tokens; name the target that the head was made",
    ),
    "a larger vocabulary with its own matrices": (
        head_files.dflash_zlab,
        lambda c, t: [
            c.update(vocab_size=44),
            t.update(
                {f"{name}.weight": torch.ones(44, 16) for name in ("embed_tokens", "lm_head")}
            ),
        ],
        "vocab_size is 44, but the target has 40 tokens; name the target that the head was made",
    ),
    "a map of a larger vocabulary": (
        head_files.eagle3_speculators,
        lambda c, t: [
            c.update(transformer_layer_config=c["transformer_layer_config"] | {"vocab_size": 50}),
            t.update({"embed_tokens.weight": torch.ones(50, 16), **larger_map(50)}),
        ],
        "d2t leads to the ids .*, outside the target's 0 to 39; name the target that the head was",
    ),
    "a Medusa of another vocabulary": (
        head_files.medusa_official,
        lambda c, t: t.update({"0.1.weight": torch.ones(44, 16)}),
        "vocab_size is 44, but the target has 40 tokens; name the target that the head was made",
    ),
    "a token map that repeats": (
        head_files.medusa_vllm,
        lambda c, t: [
            c.update(truncated_vocab_size=2),
            t.update(token_map=torch.tensor([3, 3])),
        ],
        "token_map has 1 ids, not 2 different ones",
    ),
    "a token map beyond the vocabulary": (
        head_files.medusa_vllm,
        lambda c, t: [
            c.update(truncated_vocab_size=2),
            t.update(token_map=torch.tensor([3, VOCAB])),
        ],
        "token_map has ids outside the target's 0 to 39",
    ),
    "ids out of range": (
        head_files.eagle3_speculators,
        lambda c, t: t["d2t"].__setitem__(-1, VOCAB),
        "d2t leads to the ids .* outside the target's 0 to 39",
    ),
    "ids that repeat": (
        head_files.eagle3_speculators,
        lambda c, t: t["d2t"].__setitem__(1, int(t["d2t"][0]) - 1),
        "d2t leads to 23 ids only, not to 24",
    ),
    "maps that contradict": (
        head_files.eagle3_speculators,
        lambda c, t: t["t2d"].logical_not_(),
        "t2d lists 16 ids, which are not the 24 ids of d2t",
    ),
    "no map": (
        head_files.eagle3_speculators,
        lambda c, t: [t.pop("d2t"), t.pop("t2d")],
        "d2t is missing, but its vocabulary of 24 is not the target's",
    ),
    "no lm_head of a reduced vocabulary": (
        head_files.eagle3_speculators,
        lambda c, t: t.pop("lm_head.weight"),
        r"lm_head\.weight are missing",
    ),
    "both norms before fc": (
        head_files.eagle3_speculators,
        lambda c, t: c.update(fc_norm=True, norm_before_fc=True),
        "fc_norm and norm_before_fc exclude each other",
    ),
    "an unknown rotary embedding": (
        head_files.eagle3_safeailab,
        lambda c, t: c.update(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "rope_parameters has the type 'dynamic'",
    ),
    "a part of the channels that cannot be rotated": (
        head_files.eagle3_safeailab,
        lambda c, t: c.update(partial_rotary_factor=0.3),
        "partial_rotary_factor of 16 channels makes 4.8, which is no even number from 2 to 16",
    ),
    "ModelOpt's variants": (
        head_files.eagle3_modelopt,
        lambda c, t: c["eagle_config"].update(use_mtp_layernorm=True),
        r"eagle_config\.use_mtp_layernorm must be false",
    ),
    "no mask token": (
        head_files.dflash_zlab,
        lambda c, t: c["dflash_config"].pop("mask_token_id"),
        "mask_token_id is missing",
    ),
    "a mask token that is a text": (
        head_files.dflash_zlab,
        lambda c, t: c["dflash_config"].update(mask_token_id="<mask>"),
        r"dflash_config\.mask_token_id must be a whole number",
    ),
    "a projector of others": (
        head_files.dflash_zlab,
        lambda c, t: c["dflash_config"].update(projector_type="domino"),
        "projector_type 'domino' is not supported",
    ),
    "an unknown markov head": (
        head_files.dspark_deepspec,
        lambda c, t: c.update(markov_head_type="lstm"),
        "markov_head_type must be one of vanilla, gated, rnn",
    ),
    "an architecture of others": (
        head_files.dflash_zlab,
        lambda c, t: c.update(architectures=["DFlash2DraftModel"]),
        "names DFlash2DraftModel, which is not read; serve the target with vLLM",
    ),
    "a type of others": (
        head_files.eagle3_speculators,
        lambda c, t: c.update(speculators_model_type="xpress"),
        "speculators_model_type is 'xpress'",
    ),
    "MTP of others": (
        head_files.mtp_mimo,
        lambda c, t: c.update(model_type="deepseek_v3"),
        "model_type is 'deepseek_v3', and only .* MiMo-7B .* vLLM",
    ),
    "several MTP layers": (
        head_files.mtp_mimo,
        lambda c, t: c.update(num_nextn_predict_layers=2),
        "num_nextn_predict_layers must be 1, not 2",
    ),
    "latent attention": (
        head_files.eagle3_modelopt,
        lambda c, t: t.update({"layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.ones(4)}),
        "belongs to latent attention",
    ),
    "no bias in EAGLE": (
        head_files.eagle_vllm,
        lambda c, t: t.pop("model.fc.bias"),
        "fc.bias are missing",
    ),
    "no head at all": (
        head_files.eagle_safeailab,
        lambda c, t: t.pop("fc.weight"),
        r"architectures is \['LlamaForCausalLM'\], and neither that nor the names of its weights",
    ),
    "a Medusa head whose number leaves a gap": (
        head_files.medusa_official,
        lambda c, t: t.update({"999999999999.0.linear.bias": torch.ones(16)}),
        r"nothing in it reads the weights 999999999999\.0\.linear\.bias",
    ),
    "a ReDrafter of another width": (
        head_files.redrafter_apple,
        lambda c, t: c.update(hidden_size=32),
        "hidden_size is 32, but the target's is 16",
    ),
    "a ReDrafter of another vocabulary": (
        head_files.redrafter_apple,
        lambda c, t: c.update(vocab_size=44),
        "vocab_size is 44, but the target has 40 tokens; name the target that the head was made",
    ),
    "a ReDrafter that says nothing of its recurrent weights": (
        head_files.redrafter_apple,
        lambda c, t: c.pop("rnn"),
        r"nothing in it reads the weights rnn_u\.bias, rnn_u\.weight, rnn_w\.weight",
    ),
    "a ReDrafter with another number of blocks": (
        head_files.redrafter_apple,
        lambda c, t: c.update(num_draft_layers=2),
        r"the weights lm_head\.1\.linear\.weight are missing",
    ),
    "a mask beyond the vocabulary": (
        head_files.dflash_zlab,
        lambda c, t: c["dflash_config"].update(mask_token_id=10**6),
        "mask_token_id must be",
    ),
    "a Medusa head less": (
        head_files.medusa_official,
        lambda c, t: t.pop("1.0.linear.bias"),
        r"1\.0\.linear\.bias are missing",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_head_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    files, spoil, words = BROKEN[name]
    config, tensors = files()
    spoil(config, tensors)
    assert_refused(write(tmp_path, (config, tensors)), words)


def assert_refused(folder: Path, words: str) -> None:
    with pytest.raises(OutriderError, match=words) as error:
        read(folder, TARGET)
    assert error.value.reason is Reason.INVALID_VALUE
    assert str(folder) in error.value.message


def test_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="it is no folder"):
        read(tmp_path / "none", TARGET)


# The number of configs of each head that are tried.
CONFIGS = 8
JUNK: list[Any] = [None, -1, 0, 1.5, 10**12, "x", [], [1, "x"], {"x": 1}, True]


def spoiled(config: Any) -> Any:
    """Yield configs with one key, at any depth, set to one junk value."""
    for key, value in config.items():
        for junk in JUNK:
            yield config | {key: junk}
        if isinstance(value, dict):
            yield from (config | {key: inner} for inner in spoiled(value))


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", DIALECTS)
def test_any_value_of_a_key_is_read_or_refused(kind: str, part: int, tmp_path: Path) -> None:
    """Reading a head raises only OutriderError, and a head that was read loads without an error."""
    config, tensors = list(DIALECTS[kind].values())[-part]()
    folder = write(tmp_path, (config, tensors))
    weights = TargetWeights(torch.zeros(VOCAB, 16), torch.zeros(VOCAB, 16))
    configs = list(spoiled(config))
    for spoilt in random.Random(part).sample(configs, min(CONFIGS, len(configs))):
        (folder / "config.json").write_text(json.dumps(spoilt))
        try:
            head = read(folder, TARGET)
        except OutriderError as error:
            assert error.reason is Reason.INVALID_VALUE  # noqa: PT017
            continue
        load(head, weights, page_count=4)
