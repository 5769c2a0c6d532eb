"""Compiles the GPU kernels for some architectures, without a GPU.

Prints one line of JSON for each kernel: its shared memory, its registers and bytes of stack of a
thread, its instructions, and whether it uses tensor cores. Registers that do not suffice spill to
the stack.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outrider.lm.gpu import move_tokens, triton_attention
from outrider.sampling import noise_kernel

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def compiled(
    kernel: Any, architecture: int, types: dict[str, str], constants: dict[str, Any]
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
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32))


def attend(
    architecture: int,
    dtype: torch.dtype,
    size: int,
    max_seqlen_q: int,
    *,
    windowed: bool = False,
    capped: bool = False,
    trees: bool = True,
    single_part: bool = False,
) -> Any:
    lanes = triton_attention.padded_lanes(size)
    rows, keys = triton_attention.tile_shape(max_seqlen_q, 4, lanes, dtype)
    data = "*" + TYPES[dtype]
    types = {
        **dict.fromkeys(("query", "keys", "values"), data),
        "out": data if single_part else "*fp32",
        "log_totals": "*fp32",
        **dict.fromkeys(("cu_seqlens_q", "seq_lens", "block_table"), "*i32"),
        **dict.fromkeys(("positions", "tree_starts"), "*i32"),
        "ancestors": "*i64",
        **dict.fromkeys(("width", "token_count", "window"), "i32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
    }
    sizes = {"KEY_SIZE": size, "VALUE_SIZE": size, "KEY_LANES": lanes, "VALUE_LANES": lanes}
    flags = {
        "WINDOWED": windowed,
        "CAPPED": capped,
        "TREES": trees,
        "EXACT": dtype is torch.float32,
    }
    constants = {
        "GROUP": 4,
        "KV_HEADS": 8,
        "PAGE_SIZE": 16,
        "ROWS": rows,
        "KEYS": keys,
        "PART": 1024,
        **sizes,
        **flags,
    }
    return compiled(triton_attention._attend, architecture, types, constants)


def join(architecture: int, dtype: torch.dtype, size: int, *, windowed: bool) -> Any:
    types = {
        "parts": "*fp32",
        "log_totals": "*fp32",
        "out": "*" + TYPES[dtype],
        "slots": "*i32",
        "positions": "*i32",
        "row_count": "i32",
        "window": "i32",
    }
    constants = {
        "HEADS": 32,
        "SIZE": size,
        "LANES": triton_attention.padded_lanes(size),
        "PART": 1024,
        "WINDOWED": windowed,
    }
    return compiled(triton_attention._join, architecture, types, constants)


def move(architecture: int) -> Any:
    types = {"addresses": "*i64", "widths": "*i32", "moves": "*i64", "count": "i32"}
    constants = {"MOVES": move_tokens._MOVES, "LANES": move_tokens._LANES}
    return compiled(move_tokens._move, architecture, types, constants)


def resources(kernel: Any) -> dict[str, int]:
    """Return a thread's registers and bytes of stack, and the number of instructions."""
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
        "stack": found["STACK"],
        "instructions": instructions,
    }


def race(architecture: int) -> Any:
    types = {
        "probs": "*fp32",
        "keys": "*i64",
        "best": "*fp64",
        "tokens": "*i64",
        "vocab_size": "i32",
    }
    return compiled(noise_kernel._race, architecture, types, {"BLOCK": noise_kernel._BLOCK})


if __name__ == "__main__":
    for architecture in (80, 90, 100):
        kernels = {
            "one token each, bfloat16": attend(architecture, torch.bfloat16, 128, 1, trees=False),
            "short sequences, bfloat16": attend(
                architecture, torch.bfloat16, 128, 6, windowed=True, single_part=True
            ),
            "drafts, bfloat16": attend(architecture, torch.bfloat16, 128, 6),
            "prompts, bfloat16": attend(architecture, torch.bfloat16, 128, 512, trees=False),
            "prompts and trees, bfloat16": attend(architecture, torch.bfloat16, 128, 512),
            "large heads, bfloat16": attend(
                architecture, torch.bfloat16, 256, 512, windowed=True, capped=True
            ),
            "heads of 80, float16": attend(architecture, torch.float16, 80, 6, capped=True),
            "float32": attend(architecture, torch.float32, 128, 512),
            "large heads, float32": attend(architecture, torch.float32, 256, 512),
            "parts": join(architecture, torch.bfloat16, 128, windowed=False),
            "parts, window": join(architecture, torch.bfloat16, 128, windowed=True),
            "moves": move(architecture),
            "noise": race(architecture),
        }
        for name, kernel in kernels.items():
            uses_tensor_cores = any(
                word in kernel.asm["ptx"] for word in ("mma.sync", "wgmma.", "tcgen05.mma")
            )
            line = {
                "architecture": architecture,
                "name": name,
                "shared": kernel.metadata.shared,
                **resources(kernel),
                "mma": uses_tensor_cores,
            }
            print(json.dumps(line))
