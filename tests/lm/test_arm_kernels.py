"""The ARM builds of the C kernels, in QEMU, are right, and a row's bits depend on no other row."""

from __future__ import annotations

import itertools
import random
import subprocess
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from outrider.lm.cpu.attention import PagedAttention
from outrider.lm.cpu.library import (
    AT_HWCAP,
    AT_HWCAP2,
    HWCAP2_BF16,
    HWCAP2_I8MM,
    HWCAP_ASIMDDP,
)
from outrider.lm.cpu.weights import TiledLinear
from outrider.lm.layout import BatchLayout, SequenceSlice
from outrider.lm.runner import ModelRunner
from outrider.lm.softmax import Softmax
from outrider.protocol.draft_messages import FINAL_STATE
from tests.lm import test_cpu_attention, test_cpu_decoder
from tests.lm.arm_processor import (
    COMPILER,
    PROCESSORS,
    SYSROOT,
    Memory,
    arm_library,
    library_files,
    missing,
    use_arm_build,
)
from tests.lm.builds import use_build
from tests.lm.test_cpu_decoder import cpu_runner, ids
from tests.lm.tiny_models import VOCAB_SIZE
from tests.tree_paths import path_to

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]
# Heads of two vectors, several blocks of columns, and a vocabulary that fills no whole number of
# blocks.
SIZES = test_cpu_decoder.SIZES | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
CONFIGS = {
    "biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "norms of heads": Qwen3Config(**SIZES),
}
INSTRUCTIONS = {
    "_cpu": set[str](),
    "_cpu_arm_dot": {"sdot"},
    "_cpu_arm_bf16": {"usmmla", "bfmmla", "bfdot", "bfcvtn"},
}
"""The instructions of each build that the oldest ARM processors lack."""
ALL_INSTRUCTIONS = set[str]().union(*INSTRUCTIONS.values())
# A capability's name in Linux, its bit, the auxiliary entry that has the bit, and the builds whose
# processors have the capability.
CAPABILITIES = [
    ("HWCAP_ASIMDDP", HWCAP_ASIMDDP, AT_HWCAP, {"_cpu_arm_dot", "_cpu_arm_bf16"}),
    ("HWCAP2_I8MM", HWCAP2_I8MM, AT_HWCAP2, {"_cpu_arm_bf16"}),
    ("HWCAP2_BF16", HWCAP2_BF16, AT_HWCAP2, {"_cpu_arm_bf16"}),
]


@pytest.fixture(params=PROCESSORS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of an ARM build, which objects created from now on use."""
    used: str = request.param
    use_arm_build(used, monkeypatch)
    return used


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    wanted: torch.dtype = request.param
    return wanted


@pytest.fixture(params=[torch.bfloat16, torch.float32, torch.int8], ids=str)
def numbers(request: pytest.FixtureRequest) -> torch.dtype:
    wanted: torch.dtype = request.param
    return wanted


def test_a_cross_compiler_builds_the_libraries_of_its_own_architecture() -> None:
    assert set(library_files()) == set(PROCESSORS)


@pytest.mark.parametrize("build", PROCESSORS)
def test_a_build_has_the_instructions_of_its_kind_of_processor(build: str) -> None:
    dump = COMPILER.replace("gcc", "objdump")
    command = [dump, "--disassemble", str(library_files()[build])]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {instruction for instruction in ALL_INSTRUCTIONS if f"\t{instruction}\t" in code}
    assert found == INSTRUCTIONS[build]


@pytest.mark.parametrize("build", PROCESSORS)
def test_linux_names_the_processors_that_run_each_build(build: str) -> None:
    defined = (SYSROOT / "include/asm/hwcap.h").read_text()
    for name, bit, entry, processors in CAPABILITIES:
        assert f"#define {name}\t\t(1 << {bit.bit_length() - 1})" in defined
        capabilities = arm_library(build).ask("getauxval", Memory(), [entry])
        assert bool(capabilities & bit) == (build in processors), name


def layers(dtype: torch.dtype, rows: int) -> list[tuple[torch.nn.Linear, torch.Tensor]]:
    """Return layers with whole and partial blocks of columns, and inputs with `rows` rows.

    The terms of the first layer's sums cancel each other. So its outputs are only the rounding
    errors of its sums, and any other order of the terms would show.
    """
    torch.manual_seed(0)
    found = []
    for ins, outs, bias in ((96, 64, False), (160, 95, True), (32, 40, True)):
        layer = torch.nn.Linear(ins, outs, bias=bias).requires_grad_(False)
        x = torch.randn(rows, ins)
        if not bias:
            layer.weight[:, ins // 2 :] = -layer.weight[:, : ins // 2]
            x[:, ins // 2 :] = x[:, : ins // 2]
        found.append((layer.to(dtype), x.to(dtype)))
    return found


def test_a_product_is_as_exact_as_its_sums(name: str, dtype: torch.dtype) -> None:
    """At worst, a step of a sum rounds to odd: it is off by less than a unit in the last place."""
    for layer, x in layers(dtype, 33):
        tiled = TiledLinear(layer.weight, layer.bias)
        exact = layer.double()(x.double())
        terms = x.double().abs() @ layer.weight.abs().T
        bound = layer.in_features * 2.0**-23 * terms + exact.abs() * torch.finfo(dtype).eps
        assert torch.equal(tiled.weight.double(), layer.weight)
        assert ((tiled(x).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("numbers", ["bfloat16", "float32", "int8"])
def test_a_rows_product_has_the_same_bits_beside_any_others(name: str, numbers: str) -> None:
    dtype = torch.float32 if numbers == "float32" else torch.bfloat16
    for layer, x in layers(dtype, 34):
        tiled = TiledLinear(layer.weight, layer.bias, int8=numbers == "int8")
        single = torch.cat([tiled(row[None]) for row in x])
        for rows in range(2, 34):
            # In the second product each row has another place in its pair and its tile.
            assert torch.equal(tiled(x[:rows]), single[:rows]), f"{rows} rows"
            assert torch.equal(tiled(x[1 : rows + 1]), single[1 : rows + 1]), f"{rows} rows"


def test_int8_weights_multiply_like_their_values_but_for_the_rows_rounding(name: str) -> None:
    """A row's element is off by at most half a step: 1/254 of its group's largest element."""
    for layer, x in layers(torch.bfloat16, 9):
        tiled = TiledLinear(layer.weight, layer.bias, int8=True)
        weight = tiled.weight.double()
        bias = 0 if layer.bias is None else layer.bias.double()
        exact = x.double() @ weight.T + bias
        largest = x.double().abs().view(9, -1, 32).amax(2).repeat_interleave(32, 1)
        # The values of `weight` are rounded to bfloat16.
        bound = largest @ weight.abs().T * (1 / 250 + 2.0**-8) + exact.abs() * 2.0**-8
        assert ((tiled(x).double() - exact).abs() <= bound).all()


def test_int8_products_have_the_same_bits_with_all_of_arms_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of integers are exact, and each build adds up the same groups with the same rounding."""
    outputs = []
    for build in PROCESSORS:
        use_arm_build(build, monkeypatch)
        given = layers(torch.bfloat16, 33)
        outputs.append([TiledLinear(layer.weight, layer.bias, int8=True)(x) for layer, x in given])
    assert outputs[0][1].count_nonzero() > 300
    for others in outputs[1:]:
        assert all(map(torch.equal, outputs[0], others))


def test_plain_neon_multiplies_bfloat16_to_the_bits_of_the_portable_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products of two bfloat16 are exact in float, so ARM's fused sums of products do no harm."""
    outputs = []
    for use, build in ((use_build, "_cpu"), (use_arm_build, "_cpu")):
        use(build, monkeypatch)
        given = layers(torch.bfloat16, 33)
        outputs.append([TiledLinear(layer.weight, layer.bias)(x) for layer, x in given])
    assert outputs[0][0].count_nonzero() > 300
    assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize("shape", test_cpu_attention.SHAPES)
def test_its_attention_equals_plain_attention(shape: str, name: str, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3}[dtype]
    test_cpu_attention.test_its_output_equals_plain_attention(shape, dtype, tolerance)


def test_a_page_behind_a_text_is_ignored_even_if_it_is_nan(name: str) -> None:
    test_cpu_attention.test_earlier_content_of_a_page_is_ignored_even_if_it_is_nan()


@pytest.mark.parametrize("seed", range(6))
def test_attention_to_a_tree_gives_each_row_the_bits_of_its_chain(
    seed: int, name: str, dtype: torch.dtype
) -> None:
    draw = random.Random(seed)
    page_size, head_size, before = draw.choice([5, 16]), draw.choice([16, 64]), draw.randrange(40)
    count = draw.randrange(2, 40)
    parents = [draw.randint(0, i) for i in range(count)]
    pages = draw.sample(range(64), -(-(before + 65) // page_size))
    torch.manual_seed(seed)
    cache = torch.randn(2, 64, page_size, 2, head_size).to(dtype)
    query = torch.randn(count + 1, 8, head_size).to(dtype)
    key, value = torch.randn(2, count + 1, 2, head_size).to(dtype)

    def attend(rows: list[int], parents: list[int]) -> torch.Tensor:
        part = SequenceSlice([0] * len(rows), before, pages, 0, parents)
        batch = BatchLayout([part], page_size, torch.device("cpu")).cpu_batch
        q, k, v = (held[rows][None].transpose(1, 2) for held in (query, key, value))
        return PagedAttention(*cache.clone()).attend(batch, q, k, v, Softmax(0.2))

    tree = attend([*range(count + 1)], parents)
    for row in draw.sample(range(count + 1), min(4, count)):
        assert torch.equal(tree[row], attend([0, *path_to(row, parents)], [])[-1])


@cache
def runner_of(name: str, numbers: torch.dtype, config: str = "biases") -> ModelRunner:
    """Return a runner of a tiny model with an ARM build, or this machine's portable build.

    torch.int8 stands for a bfloat16 model with weights in int8.
    """
    with pytest.MonkeyPatch.context() as patch:
        if name == "portable":
            use_build("_cpu", patch)
        else:
            use_arm_build(name, patch)
        int8 = numbers is torch.int8
        dtype = torch.bfloat16 if int8 else numbers
        runner = cpu_runner(CONFIGS[config], dtype, int8=int8)
    # The decoder is there only if, in a trial, its logits were about as near to exact numbers as
    # the logits of the model's own forward.
    assert runner.decoder is not None
    return runner


@pytest.mark.parametrize("config", CONFIGS)
def test_its_logits_are_those_of_the_portable_build_but_for_rounding(
    config: str, name: str, numbers: torch.dtype
) -> None:
    part = SequenceSlice(ids(40), 0, [5, 2, 9], 40)
    found, portable = (runner_of(by, numbers, config).forward([part]) for by in (name, "portable"))
    relative = {torch.bfloat16: 0.05, torch.int8: 0.15, torch.float32: 1e-5}[numbers]
    torch.testing.assert_close(found, portable, rtol=0, atol=relative * float(portable.std()))


def test_a_forward_has_the_same_bits_beside_others_in_pieces_and_on_two_threads(
    name: str, numbers: torch.dtype
) -> None:
    runner = runner_of(name, numbers)
    tokens = ids(37)
    whole = runner.forward([SequenceSlice(tokens, 0, [0, 1, 2], 37)])
    pages = [20, 11, 32]
    pieces = [
        runner.forward([SequenceSlice(tokens[start:end], start, pages, end - start)])
        for start, end in itertools.pairwise([0, 1, 3, 36, 37])
    ]
    assert torch.equal(torch.cat(pieces), whole)
    others = [SequenceSlice(ids(1, i), 0, [40 + i], 1) for i in range(12)]
    at_first = torch.get_num_threads()
    for threads, count in ((1, 1), (1, 6), (2, 12)):
        torch.set_num_threads(threads)
        try:
            beside = runner.forward([*others[:count], SequenceSlice(tokens, 0, pages, 37)])
        finally:
            torch.set_num_threads(at_first)
        assert torch.equal(beside[count:], whole), f"beside {count}, {threads} threads"


def test_a_greedy_continuation_equals_one_forward_a_token(name: str, numbers: torch.dtype) -> None:
    runner = runner_of(name, numbers)
    texts = [ids(15, 1), ids(30, 2)]
    pages = [[4, 1, 3], [7, 0, 9]]
    chosen: list[list[int]] = []
    logits = []
    for count in range(5):
        grown = [text + [row[i] for row in chosen] for i, text in enumerate(texts)]
        parts = zip(grown, pages, strict=True)
        logits.append(
            runner.forward([SequenceSlice(text, 0, where, 1) for text, where in parts]).clone()
        )
        chosen.append(logits[count].argmax(-1).tolist())
    parts = zip(texts, pages, strict=True)
    last = [SequenceSlice(text[-1:], len(text) - 1, where, 1) for text, where in parts]
    found = runner.continue_with_logits(last, 5, VOCAB_SIZE)
    assert found is not None
    assert found[0].tolist() == chosen
    assert torch.equal(found[1], torch.stack(logits))


def test_it_keeps_the_hidden_states_of_the_portable_build(name: str, numbers: torch.dtype) -> None:
    states = [0, 1, 2, FINAL_STATE]
    kept = []
    for by in (name, "portable"):
        runner = runner_of(by, numbers)
        runner.watch(states)
        runner.forward([SequenceSlice(ids(9), 0, [3], 1)])
        rows = range(9)
        dtype = str(runner.dtype).removeprefix("torch.")
        kept.append(runner.pick_states(states, rows, dtype).float())
        runner.watch([])
    tolerance = {torch.bfloat16: 0.05, torch.int8: 0.15, torch.float32: 1e-5}[numbers]
    torch.testing.assert_close(kept[0], kept[1], rtol=tolerance, atol=tolerance)
