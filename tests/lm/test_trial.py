"""A model is served only if the served forward gives the logits of the model's own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BertConfig,
    DiffLlamaConfig,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    RobertaConfig,
)

from outrider.errors import OutriderError, Reason
from outrider.lm.cpu.weights import optimize_for_cpu
from outrider.lm.runner import ModelRunner
from tests.lm.tiny_models import CONFIGS, VOCAB_SIZE, build

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
DIFFERS = "with the paged attention its logits differ from those of its own forward by"
TYPES: dict[str, tuple[PreTrainedConfig, str]] = {
    "two attentions in a layer": (DiffLlamaConfig(**SIZES), "layer 0 attends 2 times in a forward"),
    "an encoder": (BertConfig(**SIZES), "it uses attention to later tokens"),
    "positions that begin behind the padding's": (RobertaConfig(**SIZES, is_decoder=True), DIFFERS),
    "positions counted by its own cache": (
        BartConfig(
            vocab_size=VOCAB_SIZE,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            max_position_embeddings=128,
        ),
        DIFFERS,
    ),
    "a context shorter than the trial": (
        LlamaConfig(**SIZES | {"max_position_embeddings": 8}),
        "its context of 8 tokens is too short",
    ),
}


def refusal(model: Any, **options: Any) -> str:
    """Return the message with which a runner refuses the model."""
    with pytest.raises(OutriderError, match=r"^the-model cannot be served: ") as error:
        ModelRunner(model, "the-model", **options)
    assert (error.value.reason, error.value.field) == (Reason.INVALID_VALUE, "model")
    return error.value.message


@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_refused_for(name: str) -> None:
    config, reason = TYPES[name]
    assert reason in refusal(build(config), page_count=8)


def llama(kind: type[LlamaForCausalLM] = LlamaForCausalLM) -> Any:
    """Return a Llama of this class with the weights of `build`."""
    model = build(LlamaConfig(**SIZES))
    model.__class__ = kind
    return model


class Recurrent(LlamaForCausalLM):
    """Adds half of the previous token's embedding, which a row that was cut or packed lacks."""

    def forward(self, input_ids: Any = None, logits_to_keep: Any = 0, **more: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        before = torch.nn.functional.pad(embedded, (0, 0, 1, 0))[:, :-1]
        inputs = embedded + before / 2
        return super().forward(inputs_embeds=inputs, logits_to_keep=logits_to_keep, **more)


class CountsItsRow(LlamaForCausalLM):
    """Takes a token's number in its row as its position, whatever `position_ids` says."""

    def forward(self, position_ids: Any = None, logits_to_keep: Any = 0, **more: Any) -> Any:
        return super().forward(logits_to_keep=logits_to_keep, **more)


class OneTokenApart(LlamaForCausalLM):
    """Computes rows with one token differently from longer rows."""

    def forward(self, input_ids: Any = None, logits_to_keep: Any = 0, **more: Any) -> Any:
        output = super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **more)
        if input_ids.shape[1] == 1:
            output.logits = output.logits.roll(1, -1)
        return output


class ForgetsTheFarPast(LlamaForCausalLM):
    """Hides tokens 20 or more back by a mask, which the runner's attention does not have."""

    def forward(self, attention_mask: Any = None, logits_to_keep: Any = 0, **more: Any) -> Any:
        if attention_mask is not None:
            place = torch.arange(attention_mask.shape[1])
            back = place[:, None] - place
            attention_mask = ((back >= 0) & (back < 20))[None, None]
        return super().forward(attention_mask=attention_mask, logits_to_keep=logits_to_keep, **more)


OWN_WAYS = [Recurrent, CountsItsRow, OneTokenApart, ForgetsTheFarPast]


@pytest.mark.parametrize("kind", OWN_WAYS)
def test_a_forward_of_its_own_kind_is_refused_in_a_cache_of_any_size(
    kind: type[LlamaForCausalLM],
) -> None:
    for page_count in (1, 64):
        assert DIFFERS in refusal(llama(kind), page_count=page_count)


class NeedsMask(LlamaForCausalLM):
    def forward(self, attention_mask: Any = None, logits_to_keep: Any = 0, **more: Any) -> Any:
        attention_mask[:, 0]


class NeedsPatience(LlamaForCausalLM):
    def forward(self, logits_to_keep: Any = 0, **more: Any) -> Any:
        raise AssertionError("line one\n  and line two " + "of many" * 1000)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (NeedsMask, "its forward needs an attention mask (TypeError: 'NoneType' object is not"),
        (NeedsPatience, "its forward failed with AssertionError: line one and line two of many"),
    ],
)
def test_an_error_of_any_type_is_a_refusal_of_one_short_line(
    kind: type[LlamaForCausalLM], reason: str
) -> None:
    message = refusal(llama(kind), page_count=4)
    assert reason in message
    assert "\n" not in message
    assert len(message) < 400


def test_logits_that_are_no_numbers_are_refused() -> None:
    model = llama()
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    assert "some of its logits are not numbers in torch.float32" in refusal(model, page_count=4)


@pytest.mark.parametrize("size", [0, -8])
def test_a_piece_of_chunked_attention_has_a_length(size: Any) -> None:
    model = build(CONFIGS["llama4, pieces and temperatures by position"])
    model.config.attention_chunk_size = size
    assert "its attention_chunk_size is" in refusal(model, page_count=8)


def test_a_long_window_must_be_the_configurations() -> None:
    model = build(Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=300))
    model.model.layers[1].self_attn.sliding_window = 301
    reason = "layer 1 has a window of 301 tokens, its configuration one of 300"
    assert reason in refusal(model, page_count=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_supported_model_is_refused_for_rounding(name: str, dtype: torch.dtype) -> None:
    model = build(CONFIGS[name]).to(dtype)
    optimize_for_cpu(model)
    assert ModelRunner(model, page_count=1).dtype == dtype
