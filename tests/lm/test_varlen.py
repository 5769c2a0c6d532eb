"""What the CUDA kernel is given: a plain implementation of its documented contract, fed the same arguments, gives the right logits.

So this tests all of the CUDA path but the kernel itself, on a CPU.
"""

import random

import pytest
import torch
import torch.nn.attention.varlen
from tiny_models import CONFIGS, VOCAB_SIZE, build

from outrider.errors import OutriderError
from outrider.lm import attention
from outrider.lm.runner import ModelRunner, Slice

PAGE_SIZE = attention.VARLEN_PAGE_SIZE


def reference_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """`torch.nn.attention.varlen.varlen_attn` as its documentation has it: the queries are the last of each sequence's tokens."""
    assert query.is_contiguous()
    assert {cu_seq_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert key.shape[1] % PAGE_SIZE == 0
    assert enable_gqa
    assert int(seqused_k.max()) <= max_k
    out = torch.empty_like(query)
    for i, used in enumerate(seqused_k.tolist()):
        begin, end = cu_seq_q[i : i + 2].tolist()
        assert end - begin <= max_q
        keys, values = (cache[block_table[i].long()].flatten(0, 1)[:used] for cache in (key, value))
        repeats = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        distance = torch.arange(used - (end - begin), used)[:, None] - torch.arange(used)
        left, right = window_size
        seen = (distance >= -right) & ((distance <= left) | (left < 0))
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], keys) * scale
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
    return out


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.LayerCache, "takes_varlen", lambda self, dtype, device: True)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", reference_varlen)


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
