"""The GPU attention kernel equals a plain version.

Runs on a GPU, or by Triton's interpreter on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_kernel import paged_attention as reference
from tiny_models import CONFIGS, VOCAB_SIZE, build

from outrider.lm import attention
from outrider.lm.gpu import triton_attention
from outrider.lm.layout import BatchLayout, SequenceSlice
from outrider.lm.runner import ModelRunner
from outrider.sampling.tensors import triton_works


def batch(lengths: list[tuple[int, int]], page_size: int, pages: int) -> BatchLayout:
    """Pack slices of (tokens, tokens before them), in pages scattered over the cache."""
    order = torch.randperm(pages).tolist()
    slices = []
    for count, before in lengths:
        needed = -(-(before + count) // page_size)
        slices.append(SequenceSlice([0] * count, before, order[:needed], count))
        del order[:needed]
    return BatchLayout(slices, page_size, DEVICE)


def compare(
    layout: BatchLayout,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    pages: int = 64,
    max_seq_len: int = 1024,
    **how: float | int | None,
) -> None:
    query = torch.randn(layout.positions.numel(), heads, size, dtype=dtype, device=DEVICE)
    keys = torch.randn(pages, layout.page_size, kv_heads, size, dtype=dtype, device=DEVICE)
    values = torch.randn(
        pages, layout.page_size, kv_heads, value_size or size, dtype=dtype, device=DEVICE
    )
    options: dict[str, Any] = {"max_seq_len": max_seq_len, "scale": size**-0.5, **how}
    out = triton_attention.paged_attention(query, keys, values, layout.kernel, **options)
    expected = reference(query, keys, values, layout.kernel, **options)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROOT = Path(__file__).parents[2]
MIXED = [(1, 0), (1, 40), (5, 12), (33, 0), (3, 61), (40, 23)]


@pytest.mark.parametrize(
    "how",
    [{}, {"window": 19}, {"softcap": 2.0}, {"window": 1}, {"window": 70, "softcap": 0.5}],
    ids=str,
)
def test_prompts_drafts_and_single_tokens_in_one_batch(how: dict[str, float]) -> None:
    compare(batch(MIXED, 16, 64), **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2), (40, 1)])
def test_any_number_of_query_heads_can_share_keys(heads: int, kv_heads: int) -> None:
    compare(batch(MIXED, 16, 64), heads, kv_heads)


@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (24, 24), (80, 80), (32, 16), (8, 8)])
def test_head_sizes_need_not_be_powers_of_two(size: int, value_size: int) -> None:
    compare(batch(MIXED[:4], 16, 64), size=size, value_size=value_size)


@pytest.mark.parametrize("page_size", [1, 7, 16, 128])
def test_pages_of_any_size(page_size: int) -> None:
    pages = 128
    compare(batch([(1, 9), (4, 30)], page_size, pages), pages=pages)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 matrices wrongly; needs a GPU")
    compare(batch(MIXED, 16, 64), dtype=dtype)


@pytest.mark.parametrize("how", [{}, {"window": 100}, {"window": 1500}], ids=str)
def test_long_sequences_are_split_into_parts(how: dict[str, int]) -> None:
    """Some tokens see one key of a part, others all keys of a part and none of the next."""
    lengths = [(1, 1023), (1, 1024), (3, 2047), (1, 5), (2, 2700)]
    compare(batch(lengths, 16, 512), heads=2, kv_heads=1, pages=512, max_seq_len=4096, **how)


def test_no_sequence_has_more_than_sixteen_parts() -> None:
    lengths = [triton_attention.part_length(most) for most in (1, 1024, 16384, 16385, 131072)]
    assert lengths == [1024, 1024, 1024, 2048, 8192]


@pytest.mark.parametrize(
    "name", ["llama", "gemma2, soft cap and alternating windows", "gpt2, learned positions"]
)
def test_a_model_gets_its_own_logits_with_the_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention.LayerCache, "supports_kernel", lambda self, device: True)
    monkeypatch.setattr(ModelRunner, "_takes_graphs", lambda self: False)
    runner = ModelRunner(build(CONFIGS[name]).to(DEVICE), page_count=16)
    model = build(CONFIGS[name])
    texts = [torch.randint(VOCAB_SIZE, (n,)).tolist() for n in (50, 7, 70)]
    pages = [[3, 9, 1, 12], [4], [0, 2, 5, 6, 7]]
    for text, numbers in zip(texts, pages, strict=True):
        runner.forward([SequenceSlice(text[:-4], 0, numbers, 0)])
    logits = runner.forward(
        [
            SequenceSlice(text[-4:], len(text) - 4, numbers, 4)
            for text, numbers in zip(texts, pages, strict=True)
        ]
    )
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([text])).logits[0, -4:] for text in texts])
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("device", "size", "supported"),
    [
        ("cuda", 128, True),
        ("cuda", 100, True),
        ("cuda", 256, True),
        ("cuda", 512, False),
        ("cpu", 128, False),
    ],
)
def test_a_layer_uses_the_kernel_only_where_it_is_supported(
    device: str, size: int, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "triton_works", lambda device: device.type == "cuda")
    layer = attention.LayerCache()
    trial = torch.zeros(1, 2, 3, size)
    layer.attend(trial, trial, trial, 1.0, None, None)
    assert layer.supports_kernel(torch.device(device)) == supported


@pytest.mark.slow
def test_the_kernels_compile_for_other_gpus_and_fit_the_smallest() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 39
    # On the oldest architecture the two largest tiles spill a few registers.
    spilling = {(kernel["architecture"], kernel["name"]) for kernel in kernels if kernel["stack"]}
    assert spilling <= {(80, "large heads, bfloat16"), (80, "prompts and trees, bfloat16")}
    assert max(kernel["stack"] for kernel in kernels) <= 136
    assert max(kernel["shared"] for kernel in kernels) <= 99 * 1024
    assert {kernel["name"] for kernel in kernels if not kernel["mma"]} == {
        "float32",
        "large heads, float32",
        "parts",
        "parts, window",
        "moves",
        "noise",
    }


@pytest.mark.parametrize(
    ("capability", "compiler", "lacking"),
    [
        ((9, 0), "/usr/bin/gcc", None),
        ((7, 5), "/usr/bin/gcc", "no GPU of compute capability 8.0"),
        ((9, 0), None, "no C compiler"),
    ],
)
def test_a_log_line_says_why_kernels_cannot_run(
    capability: tuple[int, int],
    compiler: str | None,
    lacking: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("outrider.sampling.tensors.shutil.which", lambda name: compiler)
    triton_works.cache_clear()
    assert triton_works(torch.device("cuda", 0)) == (lacking is None)
    triton_works.cache_clear()
    assert lacking is None or lacking in caplog.text
