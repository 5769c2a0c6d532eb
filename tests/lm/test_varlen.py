"""What the CUDA kernel is given: a plain implementation of its documented contract, fed the same arguments, gives the right logits.

So this tests all of the CUDA path but the kernel itself, on a CPU.
"""

import random

import pytest
import torch
import torch.nn.attention.varlen
from tiny_models import CONFIGS, VOCAB_SIZE, build
from varlen_kernel import varlen_attn

from outrider.errors import OutriderError
from outrider.lm import attention
from outrider.lm.runner import ModelRunner, Slice

PAGE_SIZE = attention.VARLEN_PAGE_SIZE


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.LayerCache, "takes_varlen", lambda self, dtype, device: True)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)


@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "mistral, sliding window", "gemma3, alternating windows", "gpt2, learned positions"]
)
def test_the_kernel_gets_arguments_that_give_the_right_logits(name: str) -> None:
    runner, reference = ModelRunner(build(CONFIGS[name]), page_count=5), build(CONFIGS[name])
    assert runner.page_size == PAGE_SIZE
    pages = [[3], [4], [1, 2]]
    texts = [random.Random(i).choices(range(VOCAB_SIZE), k=n) for i, n in enumerate((70, 5, 200))]
    computed = [61, 0, 150]
    for text, page, count in zip(texts, pages, computed, strict=True):
        if count:
            runner.forward([Slice(text[:count], 0, page, 0)])
    logits = runner.forward([Slice(text[n:], n, page, len(text) - n) for text, page, n in zip(texts, pages, computed, strict=True)])
    with torch.inference_mode():
        expected = torch.cat([reference(torch.tensor([text])).logits[0, n:] for text, n in zip(texts, computed, strict=True)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("varlen_on_cpu")
def test_a_page_size_that_the_kernel_cannot_take_is_refused() -> None:
    with pytest.raises(OutriderError, match="page_size must be a multiple of 256 on cpu, not 16"):
        ModelRunner(build(CONFIGS["llama"]), page_size=16)


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "softcap", "taken"),
    [
        ("cuda", torch.bfloat16, 128, None, True),
        ("cuda", torch.float16, 256, None, True),
        ("cuda", torch.float32, 128, None, False),
        ("cuda", torch.bfloat16, 512, None, False),
        ("cuda", torch.bfloat16, 100, None, False),
        ("cuda", torch.bfloat16, 128, 50.0, False),
        ("cpu", torch.bfloat16, 128, None, False),
    ],
)
def test_the_kernel_is_chosen_where_it_can_do_the_layer(
    device: str, dtype: torch.dtype, head_size: int, softcap: float | None, taken: bool
) -> None:
    layer = attention.LayerCache()
    trial = torch.zeros(1, 2, 3, head_size)
    layer.attend(trial, trial, trial, 1.0, None, softcap)
    assert layer.takes_varlen(dtype, torch.device(device)) == taken
