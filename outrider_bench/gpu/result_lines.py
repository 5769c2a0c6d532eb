"""Writes lines of results that survive a killed process, and times work on a device."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml


class Lines:
    """Appends JSON lines to a file. Each line is on the disk before the next figure is measured."""

    def __init__(self, path: Path, step: str, seconds: float) -> None:
        """`check` raises TimeoutError after `seconds`."""
        self._path = path
        self._step = step
        self._ends = time.monotonic() + seconds

    def say(self, what: str, **figures: Any) -> None:
        """Print a line of figures and write it to the disk."""
        text = json.dumps({"step": self._step, "what": what, **figures})
        print(text, flush=True)
        with self._path.open("a") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())

    def check(self) -> None:
        """Raise TimeoutError if no further measurement may start."""
        if time.monotonic() > self._ends:
            raise TimeoutError


@dataclass(frozen=True, slots=True)
class Sizes:
    """The models, batches and lengths to measure on a kind of device; sizes.yaml has the values."""

    models: dict[str, dict[str, Any]]
    """Sizes of a `LlamaConfig`, keyed by name."""
    batches: list[int]
    contexts: list[int]
    tokens: list[int]
    """New tokens of each sequence: draft tokens, and the token before them."""
    beside_prompt: list[int]
    """Numbers of sequences that decode in the same forward as a prompt's chunk."""
    forward_tokens: int
    """The maximum number of tokens in one forward."""
    read_numbers: int
    """Float32 numbers that are copied and summed to find the device's limit."""
    repeats: int

    def short(self) -> Sizes:
        """Return sizes that take a minute or two: one context, no prompts, at most 5 new tokens."""
        return replace(self, contexts=self.contexts[:1], tokens=self.tokens[:2], beside_prompt=[])


class Device:
    """The first GPU, else the CPU. `limit` is the maximum bytes/s that a copy or a sum moves."""

    def __init__(self) -> None:
        self.is_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")
        # Triton's interpreter cannot do bfloat16.
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        known = yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text())
        self.sizes = Sizes(**known[self.device.type])
        numbers = torch.ones(self.sizes.read_numbers, device=self.device)
        copy_ms, _ = self.timed(lambda: numbers.clone())
        sum_ms, _ = self.timed(lambda: numbers.sum())
        self.limit = 1e3 * numbers.nbytes * max(2 / copy_ms, 1 / sum_ms)

    def floor_ms(self, size: float) -> float:
        """Return the milliseconds that `size` bytes take at the limit."""
        return 1e3 * size / self.limit

    def timed(self, run: Callable[[], object]) -> tuple[float, float]:
        """Return the median milliseconds of a call: on the device, and until it returns."""
        times = [self._timed(run) for _ in range(1 + self.sizes.repeats)][1:]
        return median([ms for ms, _ in times]), median([ms for _, ms in times])

    def _timed(self, run: Callable[[], object]) -> tuple[float, float]:
        if not self.is_gpu:
            began = time.perf_counter()
            run()
            ms = 1e3 * (time.perf_counter() - began)
            return ms, ms
        torch.cuda.synchronize()
        start, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        start.record()
        run()
        end.record()
        host_ms = 1e3 * (time.perf_counter() - began)
        end.synchronize()
        return start.elapsed_time(end), host_ms
