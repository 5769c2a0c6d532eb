"""GET /tokenizer_info has what lm-eval needs from a tokenizer: special tokens, chat template."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
from transformers import AutoTokenizer

from gateway.text.prompts import Prompts
from tests.gateway.gateway_rig import Rig, model_with_template, own_rig

pytestmark = pytest.mark.asyncio(loop_scope="session")

TALK = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


async def test_special_tokens_are_those_of_transformers(rig: Rig) -> None:
    told = (await rig.http.get("/tokenizer_info")).json()
    own = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models/target")
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        assert told[name] == getattr(own, name)
    # lm-eval asks for a token's id like this.
    body = {"prompt": told["eos_token"], "add_special_tokens": False}
    ids = (await rig.http.post("/tokenize", json=body)).json()["tokens"]
    assert ids == [own.eos_token_id]


async def test_the_chat_template_renders_what_the_server_renders(rig: Rig) -> None:
    told = (await rig.http.get("/tokenizer_info")).json()
    template = jinja2.Environment().from_string(told["chat_template"])
    text = template.render(messages=TALK, add_generation_prompt=True, **told)
    body = {"messages": TALK, "add_generation_prompt": True}
    ids = (await rig.http.post("/tokenize", json=body)).json()["tokens"]
    assert (await rig.http.post("/detokenize", json={"tokens": ids})).json()["prompt"] == text


async def test_tokens_that_a_tokenizer_lacks_are_null_and_lists_are_left_out(
    tmp_path: Path,
) -> None:
    config = {
        "eos_token": {"content": "<end>"},
        "bos_token": None,
        "model_max_length": 2048,
        "added_tokens_decoder": {"1": {"content": "x"}},
    }
    model = model_with_template(tmp_path, "{{ messages }}", **config)
    async with own_rig(Prompts(model), tokenizer=model) as rig:
        told = (await rig.http.get("/tokenizer_info")).json()
    assert (told["bos_token"], told["eos_token"], told["model_max_length"]) == (None, "<end>", 2048)
    assert told["chat_template"] == "{{ messages }}"
    assert "added_tokens_decoder" not in told
