"""An ARM processor in software, so that tests can call the ARM builds of the C kernels.

setup.py builds them with a cross compiler, and QEMU's user mode runs them in a process. That
process has memory of its own: each call sends it the memory to which the arguments point, and
copies back the memory that the function writes.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.lm.cpu import attention as cpu_attention
from outrider.lm.cpu import decoder as cpu_decoder
from outrider.lm.cpu import weights
from outrider.lm.cpu.attention import Batch, Layer, RowsStruct
from outrider.lm.cpu.decoder import _Decoder, _DecoderLayer, _Step
from outrider.lm.cpu.library import prefix
from outrider.lm.cpu.weights import LinearStruct, TiledLinear

COMPILER = "aarch64-linux-gnu-gcc"
QEMU = "qemu-aarch64"
# The processors of QEMU: the oldest kind of ARM processor, one with dot products of int8, and one
# with products of bfloat16 and matrix products of int8.
PROCESSORS = {"_cpu": "cortex-a72", "_cpu_arm_dot": "neoverse-n1", "_cpu_arm_bf16": "max"}
SYSROOT = Path("/usr/aarch64-linux-gnu")
_ROOT = Path(__file__).parents[2]
_KERNELS = _ROOT / "outrider/lm/cpu/kernels"
# `struct request` in arm_server.c.
_REQUEST = struct.Struct("=64s7q8qd")


def missing() -> str | None:
    """Say why this machine cannot run the ARM builds in software; None if it can."""
    if platform.machine() == "aarch64":
        return "the other tests of kernels run the ARM builds on this processor itself"
    lacking = [program for program in (COMPILER, QEMU) if shutil.which(program) is None]
    if lacking:
        return f"needs {' and '.join(lacking)}, which tests/install-tools.sh installs"
    return None


@cache
def built() -> Path:
    """Cross-compile the builds and the server; return the folder that has them.

    Later runs take what earlier runs have built from the same sources.
    """
    sources = [_ROOT / "setup.py", *sorted(_KERNELS.iterdir()), Path(__file__)]
    sources.append(Path(__file__).with_name("arm_server.c"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    folder = _ROOT / "build" / "arm-kernels"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mark = folder / "digest"
        if not mark.exists() or mark.read_text() != digest:
            _build(folder)
            mark.write_text(digest)
    return folder


def _build(folder: Path) -> None:
    setup = [sys.executable, "setup.py", "--quiet", "build"]
    folders = ["--build-base", str(folder / "base"), "--build-lib", str(folder / "lib")]
    tools = {"CC": COMPILER, "LDSHARED": f"{COMPILER} -shared"}
    shutil.rmtree(folder / "lib", ignore_errors=True)
    server = [str(Path(__file__).with_name("arm_server.c")), "-o", str(folder / "server")]
    for command in ([*setup, *folders], [COMPILER, "-O1", "-Wall", "-fopenmp", *server, "-ldl"]):
        subprocess.run(command, cwd=_ROOT, env=os.environ | tools, check=True, capture_output=True)


def library_files() -> dict[str, Path]:
    """Return the files of the builds, keyed by name."""
    folder = built() / "lib/outrider/lm/cpu"
    return {path.name.partition(".")[0]: path for path in folder.glob("*.so")}


def use_arm_build(name: str, monkeypatch: pytest.MonkeyPatch) -> ArmLibrary:
    """Use the ARM build instead of this machine's, for objects created from now on."""
    found = arm_library(name)
    for module in (cpu_attention, cpu_decoder, weights):
        monkeypatch.setattr(module, "library", lambda: found)
    monkeypatch.setattr(weights, "_constant", found.constant)
    return found


@cache
def arm_library(name: str) -> ArmLibrary:
    """Start a process with an ARM build; it ends with this process."""
    return ArmLibrary(name)


class ArmLibrary:
    """Stands for the `ctypes.CDLL` of an ARM build."""

    def __init__(self, name: str) -> None:
        command = [QEMU, "-L", str(SYSROOT), "-cpu", PROCESSORS[name], str(built() / "server")]
        self._process = subprocess.Popen(
            [*command, str(library_files()[name])], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __getattr__(self, name: str) -> _Function:
        return _Function(self, name)

    def constant(self, numbers: str, name: str) -> int:
        """Return what `outrider.lm.cpu.weights._constant` returns for a library."""
        return self.ask(prefix(numbers) + name, Memory(), [])

    def ask(self, name: str, memory: Memory, arguments: Arguments, number: float = 0.0) -> int:
        """Call a function, or read a constant of 64 bits if there are no arguments."""
        pointers = sum(1 << i for i, value in enumerate(arguments) if isinstance(value, Place))
        values = [memory.offset(it) if isinstance(it, Place) else it or 0 for it in arguments]
        values += [0] * (8 - len(values))
        body = memory.sent()
        counts = (len(body), memory.room, len(memory.written), len(memory.pointers))
        header = _REQUEST.pack(
            name.encode(),
            bool(arguments),
            torch.get_num_threads(),
            *counts,
            pointers,
            *values,
            number,
        )
        places = (memory.offset(place) for pair in memory.pointers for place in pair)
        pairs = struct.pack(f"={2 * len(memory.pointers)}q", *places)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(header + body + pairs)
        self._process.stdin.flush()
        answer = self._process.stdout.read(8 + len(memory.written))
        assert len(answer) == 8 + len(memory.written), f"{name} ended the process"
        memory.copy_back(answer[8:])
        return int.from_bytes(answer[:8], "little", signed=True)


@dataclass(frozen=True)
class Place:
    """A place in the memory that a call sends: in its `written`, `read` or `room` part."""

    part: str
    at: int


# None stands for a null pointer.
Arguments = list[int | Place | None]


class Memory:
    """The memory of one call: parts that the function writes, parts that it reads, scratch room."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.read = bytearray()
        self.room = 0
        self.pointers: list[tuple[Place, Place]] = []
        """Where a pointer lies, and where it points to."""
        self._back: list[tuple[int, int, int]] = []

    def add(self, address: int | None, size: int, *, written: bool = False) -> Place | None:
        """Send memory of this process. None stays a null pointer."""
        if not address:
            return None
        place = self.put(ctypes.string_at(address, size), "written" if written else "read")
        if written:
            self._back.append((address, place.at, size))
        return place

    def put(self, data: bytes, part: str = "read") -> Place:
        """Send bytes, at an address that is a multiple of 64, as torch allocates memory."""
        where = self.written if part == "written" else self.read
        place = Place(part, len(where))
        where += data + bytes(-len(data) % 64)
        return place

    def point(self, place: Place, offset: int, target: Place | None) -> None:
        """Set the pointer that lies `offset` bytes after `place`."""
        if target is not None:
            self.pointers.append((Place(place.part, place.at + offset), target))

    def offset(self, place: Place) -> int:
        """Return a place's distance from the beginning of the memory."""
        before = {
            "written": 0,
            "read": len(self.written),
            "room": len(self.written) + len(self.read),
        }
        return before[place.part] + place.at

    def sent(self) -> bytes:
        return bytes(self.written + self.read)

    def copy_back(self, written: bytes) -> None:
        """Copy back to this process what the function has written."""
        for address, at, size in self._back:
            ctypes.memmove(address, written[at : at + size], size)


class _Function:
    """A function of an ARM build, with the attributes of a function of `ctypes`."""

    argtypes: Any = None
    restype: Any = None

    def __init__(self, library: ArmLibrary, name: str) -> None:
        self._library = library
        self._name = name
        self._width = 4 if "float32" in name else 2
        self._weight_width = 1 if "int8" in name else self._width

    def __call__(self, *arguments: Any) -> int:
        kind = self._name.rpartition("_")[2]
        given = [getattr(argument, "_obj", argument) for argument in arguments]
        memory = Memory()
        call = getattr(self, f"_{kind}")
        return self._library.ask(self._name, memory, *call(memory, *given))

    def _product(
        self, memory: Memory, linear: LinearStruct, x: int, rows: int, out: int
    ) -> tuple[Arguments]:
        held = memory.put(bytes(linear))
        self._linear(memory, held, 0, linear)
        inputs = memory.add(x, rows * linear.in_features * self._width)
        outputs = memory.add(out, rows * linear.out_features * self._width, written=True)
        return ([held, inputs, rows, outputs],)

    def _linear(self, memory: Memory, held: Place, at: int, linear: LinearStruct) -> None:
        outs = -(-linear.out_features // TiledLinear.BLOCK) * TiledLinear.BLOCK
        for field, size in (
            ("tiles", outs * linear.in_features * self._weight_width),
            ("bias", outs * self._width),
            ("scales", outs * 4),
        ):
            target = memory.add(getattr(linear, field), size)
            memory.point(held, at + getattr(LinearStruct, field).offset, target)

    def _attention(
        self,
        memory: Memory,
        layer: Layer,
        batch: Batch,
        query: RowsStruct,
        key: RowsStruct,
        value: RowsStruct,
        out: int,
        scale: float,
        window: int,
        sinks: int | None,
    ) -> tuple[Arguments, float]:
        width = 2 if layer.is_bfloat16 else 4
        held, rows = memory.put(bytes(layer)), []
        self._caches(memory, held, 0, layer, _page_count(batch, layer.page_size, 0))
        for given, heads in ((query, layer.heads), (key, layer.kv_heads), (value, layer.kv_heads)):
            last = (heads - 1) * given.head_stride + (batch.token_count - 1) * given.token_stride
            place = memory.put(bytes(given))
            memory.point(place, 0, memory.add(given.data, (last + layer.head_size) * width))
            rows.append(place)
        size = batch.token_count * layer.heads * layer.head_size * width
        outputs = memory.add(out, size, written=True)
        sinks_at = memory.add(sinks, layer.heads * 4)
        held_batch = self._batch(memory, batch, layer.page_size, 0)
        return ([held, held_batch, *rows, outputs, window, sinks_at], scale)

    def _caches(self, memory: Memory, held: Place, at: int, layer: Layer, pages: int) -> None:
        width = 2 if layer.is_bfloat16 else 4
        size = pages * layer.page_size * layer.kv_heads * layer.head_size * width
        for field in ("keys", "values"):
            target = memory.add(getattr(layer, field), size, written=True)
            memory.point(held, at + getattr(Layer, field).offset, target)

    def _batch(self, memory: Memory, batch: Batch, page_size: int, more: int) -> Place:
        held = memory.put(bytes(batch))
        counts = {
            **dict.fromkeys(("slot_mapping", "ancestors"), batch.token_count),
            **dict.fromkeys(
                ("first_rows", "lengths", "starts", "page_offsets", "tree_starts"),
                batch.slice_count,
            ),
            "pages": _table_end(batch, page_size, more),
        }
        for field, count in counts.items():
            target = memory.add(getattr(batch, field), 8 * count)
            memory.point(held, getattr(Batch, field).offset, target)
        return held

    def _scratch(self, memory: Memory, decoder: _Decoder, count: int) -> tuple[Arguments]:
        held = memory.put(bytes(decoder))
        memory.point(held, _Decoder.layers.offset, memory.put(bytes(_layers(decoder))))
        return ([held, count],)

    def _decode(
        self, memory: Memory, decoder: _Decoder, batch: Batch, step: _Step
    ) -> tuple[Arguments]:
        logits = step.logits_count * decoder.head.out_features
        return (self._forward(memory, decoder, batch, step, logits, 0, 0),)

    def _continue(
        self,
        memory: Memory,
        decoder: _Decoder,
        batch: Batch,
        step: _Step,
        limit: int,
        count: int,
        tokens: int,
    ) -> tuple[Arguments]:
        logits = batch.slice_count * decoder.head.out_features + (count - 1) * step.logits_stride
        held = self._forward(memory, decoder, batch, step, logits, count, limit)
        chosen = memory.add(tokens, count * batch.slice_count * 8, written=True)
        return ([*held, limit, count, chosen],)

    def _forward(
        self,
        memory: Memory,
        decoder: _Decoder,
        batch: Batch,
        step: _Step,
        logits: int,
        more: int,
        limit: int,
    ) -> Arguments:
        """Send what the batch needs in a forward, and in forwards of `more` further tokens a slice.

        The further tokens have ids below `limit`.
        """
        width, page_size = self._width, _layers(decoder)[0].cache.page_size
        ids = (ctypes.c_int64 * batch.token_count).from_address(step.token_ids)
        held = memory.put(bytes(decoder))
        rows = max(*ids, limit - 1, 0) + 1
        for field, size in (
            ("embedding", rows * decoder.hidden * width),
            ("norm", decoder.hidden * width),
            ("frequencies", decoder.pairs * 4),
        ):
            target = memory.add(getattr(decoder, field), size)
            memory.point(held, getattr(_Decoder, field).offset, target)
        self._linear(memory, held, _Decoder.head.offset, decoder.head)
        pages = _page_count(batch, page_size, more)
        memory.point(held, _Decoder.layers.offset, self._layers(memory, decoder, pages))
        kept = step.state_count * batch.token_count * decoder.hidden * width
        held_step = memory.put(bytes(step))
        scratch = _Function(self._library, self._name.rpartition("_")[0] + "_scratch")
        memory.room = scratch(decoder, batch.token_count)
        memory.point(held_step, _Step.scratch.offset, Place("room", 0))
        for field, size, written in (
            ("token_ids", batch.token_count * 8, False),
            ("positions", batch.token_count * 8, False),
            ("logits_indices", step.logits_count * 8, False),
            ("logits", logits * 4, True),
            ("states", step.state_count * 8, False),
            ("kept", kept, True),
        ):
            target = memory.add(getattr(step, field), size, written=written)
            memory.point(held_step, getattr(_Step, field).offset, target)
        return [held, self._batch(memory, batch, page_size, more), held_step]

    def _layers(self, memory: Memory, decoder: _Decoder, pages: int) -> Place:
        layers = _layers(decoder)
        held = memory.put(bytes(layers))
        for i, layer in enumerate(layers):
            at = i * ctypes.sizeof(_DecoderLayer)
            for field in ("qkv", "o", "gate_up", "down"):
                offset = at + getattr(_DecoderLayer, field).offset
                self._linear(memory, held, offset, getattr(layer, field))
            for field in ("input_norm", "post_norm", "query_norm", "key_norm"):
                of_head = field in ("query_norm", "key_norm")
                size = layer.cache.head_size if of_head else decoder.hidden
                target = memory.add(getattr(layer, field), size * self._width)
                memory.point(held, at + getattr(_DecoderLayer, field).offset, target)
            self._caches(memory, held, at + _DecoderLayer.cache.offset, layer.cache, pages)
        return held


def _layers(decoder: _Decoder) -> ctypes.Array[_DecoderLayer]:
    return (_DecoderLayer * decoder.layer_count).from_address(decoder.layers)


def _numbers(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address)) if count else []


def _table_end(batch: Batch, page_size: int, more: int) -> int:
    """Return the length of the array of page numbers if each slice has `more` further tokens."""
    count = batch.slice_count
    columns = (_numbers(at, count) for at in (batch.page_offsets, batch.starts, batch.lengths))
    rows = zip(*columns, strict=True)
    ends = (offset - (start + length + more) // -page_size for offset, start, length in rows)
    return max(ends, default=0)


def _page_count(batch: Batch, page_size: int, more: int) -> int:
    """Return how many pages, from the cache's first page on, include all that a batch can reach."""
    pages = _numbers(batch.pages, _table_end(batch, page_size, more))
    slots = _numbers(batch.slot_mapping, batch.token_count)
    return max([*pages, *(slot // page_size for slot in slots)], default=-1) + 1
