"""Compiles the GPU kernels for four architectures, without a GPU.

    python -m tests.lm.compile_kernels FOLDER

writes `kernels.csv` with the resources of each kernel, and `programs.csv` with the number of
programs of the attention kernel that run for plain steps, drafts, trees and a prompt's chunk.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.lm.gpu import layer_kernels, move_tokens, tiles, triton_attention
from outrider.sampling import noise_kernel, penalty_kernel

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# The cards by architecture: A100, L4, H100, B200.
CARDS = {
    80: tiles.Card(163 * 1024, 108, 8),
    89: tiles.Card(99 * 1024, 58, 8),
    90: tiles.Card(227 * 1024, 132, 9),
    100: tiles.Card(227 * 1024, 148, 10),
}
# Heads of a layer of Llama-3.1-8B, and the model's context.
LLAMA = tiles.Heads(4, 8, 128, 128, torch.bfloat16)
CONTEXT = 131072


def compiled(
    kernel: Any,
    architecture: int,
    types: dict[str, str],
    constants: dict[str, Any],
    **options: Any,
) -> Any:
    names = kernel.arg_names
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.startswith("*")
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        aligned,
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def attend(
    architecture: int,
    dtype: torch.dtype,
    size: int,
    tokens_each: int,
    *,
    windowed: bool = False,
    capped: bool = False,
    sinks: bool = False,
    chunked: bool = False,
    trees: bool = True,
    split: bool = True,
) -> Any:
    heads = tiles.Heads(LLAMA.group, LLAMA.kv_heads, size, size, dtype)
    shape = tiles.tiles(tokens_each, 1, heads, CARDS[architecture])
    data = "*" + TYPES[dtype]
    types = {
        **dict.fromkeys(("query", "keys", "values", "out", "sinks"), data),
        **dict.fromkeys(("parts", "log_totals"), "*fp32" if split else data),
        **dict.fromkeys(("cu_seqlens_q", "seq_lens", "block_table"), "*i32"),
        **dict.fromkeys(("positions", "tree_starts"), "*i32"),
        "ancestors": "*i64",
        **dict.fromkeys(("width", "token_count", "sequence_count", "window"), "i32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
    }
    constants = {
        "GROUP": heads.group,
        "KV_HEADS": heads.kv_heads,
        "KEY_SIZE": size,
        "VALUE_SIZE": size,
        "KEY_LANES": heads.key_lanes,
        "VALUE_LANES": heads.value_lanes,
        "PAGE_SIZE": 16,
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "SPLIT": split,
        "DOUBLINGS": tiles.doubling_count(CONTEXT) if split else 0,
        "WINDOWED": windowed,
        "CHUNKED": chunked,
        "CAPPED": capped,
        "SINKS": sinks,
        "TREES": trees,
        "EXACT": dtype is torch.float32,
    }
    kernel = triton_attention._attend
    return compiled(kernel, architecture, types, constants, num_stages=shape.stages)


def join(
    architecture: int, dtype: torch.dtype, size: int, *, windowed: bool, sinks: bool = False
) -> Any:
    types = {
        "parts": "*fp32",
        "log_totals": "*fp32",
        **dict.fromkeys(("out", "sinks"), "*" + TYPES[dtype]),
        "slots": "*i32",
        "positions": "*i32",
        "row_count": "i32",
        "window": "i32",
    }
    constants = {
        "HEADS": 32,
        "SIZE": size,
        "LANES": size,
        "DOUBLINGS": tiles.doubling_count(CONTEXT),
        "WINDOWED": windowed,
        "CHUNKED": False,
        "SINKS": sinks,
    }
    return compiled(triton_attention._join, architecture, types, constants, num_warps=1)


def add_norm(architecture: int, dtype: torch.dtype, size: int) -> Any:
    names = ("stream", "delta", "weight", "total", "out")
    lanes = triton.next_power_of_2(size)
    constants = {"SIZE": size, "LANES": lanes, "EPSILON": 1e-5, "ADDS": True}
    return compiled(
        layer_kernels._add_norm,
        architecture,
        dict.fromkeys(names, "*" + TYPES[dtype]),
        constants,
        num_warps=layer_kernels.norm_warps(lanes),
    )


def rotate(architecture: int, dtype: torch.dtype, size: int, *, norms: bool) -> Any:
    names = ("heads", "cos", "sin", "query_weight", "key_weight", "query", "keys", "values")
    types = dict.fromkeys(names, "*" + TYPES[dtype]) | {"slots": "*i64"}
    constants = {
        "QUERY_HEADS": 32,
        "KV_HEADS": 8,
        "SIZE": size,
        "LANES": triton.next_power_of_2(size // 2),
        "EPSILON": 1e-6,
        "NORMS": norms,
    }
    return compiled(layer_kernels._rotate_and_store, architecture, types, constants, num_warps=1)


def silu_product(architecture: int, dtype: torch.dtype) -> Any:
    types = dict.fromkeys(("gate_up", "out"), "*" + TYPES[dtype])
    return compiled(layer_kernels._silu_product, architecture, types, {"SIZE": 14336})


def layer_kernels_of(architecture: int) -> dict[str, Any]:
    bf16, fp32 = torch.bfloat16, torch.float32
    return {
        "sum and norm, bfloat16": add_norm(architecture, bf16, 4096),
        "sum and norm of 576, bfloat16": add_norm(architecture, bf16, 576),
        "sum and norm of 16384, float32": add_norm(architecture, fp32, 16384),
        "heads, bfloat16": rotate(architecture, bf16, 128, norms=False),
        "normed heads, bfloat16": rotate(architecture, bf16, 128, norms=True),
        "normed heads of 256, float32": rotate(architecture, fp32, 256, norms=True),
        "gated product, bfloat16": silu_product(architecture, bf16),
        "gated product, float32": silu_product(architecture, fp32),
    }


def move(architecture: int) -> Any:
    types = {"addresses": "*i64", "widths": "*i32", "moves": "*i64", "count": "i32"}
    constants = {"MOVES": move_tokens._MOVES, "LANES": move_tokens._LANES}
    return compiled(move_tokens._move, architecture, types, constants)


def race(architecture: int) -> Any:
    types = {
        "probs": "*fp32",
        "keys": "*i64",
        "best": "*fp64",
        "tokens": "*i64",
        "vocab_size": "i32",
    }
    return compiled(noise_kernel._race, architecture, types, {"BLOCK": noise_kernel._BLOCK})


def penalise(architecture: int) -> Any:
    types = {
        "logits": "*fp32",
        "rows": "*i64",
        "counts": "*i32",
        "numbers": "*fp32",
        "vocab_size": "i32",
        "row_count": "i32",
    }
    constants = {"BLOCK": penalty_kernel._BLOCK}
    kernel = penalty_kernel._penalise
    return compiled(kernel, architecture, types, constants, enable_fp_fusion=False)


def resources(kernel: Any) -> dict[str, int]:
    """Return the registers and bytes of stack of a thread, and the number of instructions.

    If the registers do not suffice, values spill to the stack.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        commands = ("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "--print-code")
        usage, code = (
            subprocess.run(
                [_TOOLS / tool, how, file.name], check=True, capture_output=True, text=True
            ).stdout
            for tool, how in commands
        )
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", usage)}
    instructions = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE))
    return {
        "registers": found["REG"],
        "stack_bytes": found["STACK"],
        "instructions": instructions,
    }


def products(kernel: Any) -> dict[str, object]:
    """Return the instruction for products, and how the warps divide [rows, keys] for it."""
    used = [word for word in ("mma.sync", "wgmma", "tcgen05.mma") if word in kernel.asm["ptx"]]
    warps = set(re.findall(r"nvidia_mma<.*?warpsPerCTA = \[(\d+), (\d+)\]", kernel.asm["ttgir"]))
    return {
        "instruction": " ".join(used),
        "warps": " ".join("x".join(pair) for pair in sorted(warps)),
    }


def buffers(kernel: Any) -> int:
    """Return how many buffers the loop that loads keys and values has; 0 without such a loop."""
    pattern = r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x\w+, .*mutable"
    found = re.findall(pattern, kernel.asm["ttgir"])
    return min(map(int, found), default=0)


def attention_kernels(architecture: int) -> dict[str, Any]:
    bf16 = torch.bfloat16
    return {
        "one token each, bfloat16": attend(architecture, bf16, 128, 1, trees=False),
        "short sequences, bfloat16": attend(architecture, bf16, 128, 6, windowed=True, split=False),
        "drafts, bfloat16": attend(architecture, bf16, 128, 6),
        "prompts, bfloat16": attend(architecture, bf16, 128, 512, trees=False),
        "prompts and trees, bfloat16": attend(architecture, bf16, 128, 512),
        "drafts with sinks, bfloat16": attend(architecture, bf16, 64, 6, windowed=True, sinks=True),
        "drafts in pieces, bfloat16": attend(
            architecture, bf16, 128, 6, windowed=True, chunked=True
        ),
        "large heads, bfloat16": attend(architecture, bf16, 256, 512, windowed=True, capped=True),
        "heads of 80, float16": attend(architecture, torch.float16, 80, 6, capped=True),
        "float32": attend(architecture, torch.float32, 128, 512),
        "large heads, float32": attend(architecture, torch.float32, 256, 512),
    }


def other_kernels(architecture: int) -> dict[str, Any]:
    return {
        "parts": join(architecture, torch.bfloat16, 128, windowed=False),
        "parts, window": join(architecture, torch.bfloat16, 128, windowed=True),
        "parts, window, sinks": join(architecture, torch.bfloat16, 64, windowed=True, sinks=True),
        "moves": move(architecture),
        "noise": race(architecture),
        "penalties": penalise(architecture),
    }


def kernel_rows() -> Iterator[dict[str, object]]:
    for architecture in CARDS:
        kernels = {
            **attention_kernels(architecture),
            **layer_kernels_of(architecture),
            **other_kernels(architecture),
        }
        for name, kernel in kernels.items():
            yield {
                "architecture": architecture,
                "kernel": name,
                "shared_bytes": kernel.metadata.shared,
                **resources(kernel),
                "buffers": buffers(kernel),
                **products(kernel),
            }


def program_rows() -> Iterator[dict[str, object]]:
    """Yield how many programs start, and how many of them have work.

    The programs are those of a layer of Llama-3.1-8B on an H100.
    """
    steps = {"plain": [1], "drafts of 4": [5], "trees of 64": [65]}
    for step, lengths in steps.items():
        for batch in (1, 8, 64):
            for keys in (1024, 8192, 32768):
                yield programs(step, lengths * batch, keys)
    for keys in (1024, 8192, 32768):
        yield programs("plain and a prompt's chunk", [1] * 63 + [449], keys)


def programs(step: str, lengths: list[int], keys: int) -> dict[str, object]:
    card = CARDS[90]
    total = sum(lengths)
    shape = tiles.tiles(total, len(lengths), LLAMA, card)
    row_tiles, sharing = tiles.grid(
        total, len(lengths), tiles.part_count(CONTEXT), shape.rows, LLAMA, card
    )
    useful = 0
    for length in lengths:
        used = -(-length * LLAMA.group // shape.rows) * LLAMA.kv_heads
        parts = tiles.part_count(keys) if length <= tiles.WHOLE else 1
        useful += used * min(sharing, parts)
    return {
        "step": step,
        "batch": len(lengths),
        "keys": keys,
        "rows": shape.rows,
        "programs": row_tiles * sharing,
        "with_work": useful,
    }


def write(path: Path, rows: Iterator[dict[str, object]]) -> None:
    first = next(rows)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(first), lineterminator="\n")
        table.writeheader()
        table.writerow(first)
        table.writerows(rows)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write(folder / "kernels.csv", kernel_rows())
    write(folder / "programs.csv", program_rows())
