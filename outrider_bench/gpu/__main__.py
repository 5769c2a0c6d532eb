"""`python -m outrider_bench.gpu STEP DIRECTORY`: a step of `bench/gpu.sh`, or its tables.

Lines go to `DIRECTORY/lines.jsonl` as they are measured. Of Outrider's dependencies, this command
needs only torch, transformers and Triton.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    # Triton reads this when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

_KEYS = ("step", "what", "batch", "context", "tokens")


def main() -> None:
    """Run a step, or write and print the tables."""
    parser = argparse.ArgumentParser(prog="outrider_bench.gpu", description=__doc__)
    parser.add_argument("step", choices=["steps", "tables", "decisions"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no figure later")
    parser.add_argument("--short", action="store_true", help="fewer shapes: a minute or two")
    chosen = parser.parse_args()
    if chosen.step == "tables":
        _tables(chosen.directory)
    elif chosen.step == "decisions":
        from outrider_bench.gpu.decisions import decisions

        print(decisions(chosen.directory))
    else:
        print(f"steps: estimated {2 if chosen.short else 7} minutes on a GPU", flush=True)
        _measure(chosen.directory / "lines.jsonl", chosen.seconds, short=chosen.short)


@torch.inference_mode()
def _measure(path: Path, seconds: float, *, short: bool) -> None:
    from outrider_bench.gpu import steps
    from outrider_bench.gpu.result_lines import Device, Lines

    lines = Lines(path, "steps", seconds)
    device = Device()
    if short:
        device.sizes = device.sizes.short()
    name = torch.cuda.get_device_name() if device.is_gpu else "CPU"
    lines.say("device", name=name, torch=torch.__version__, gb_per_s=device.limit / 1e9)
    try:
        steps.steps(lines, device)
    except TimeoutError:
        lines.say("stopped", left_out=f"what was not begun after {seconds:g} s")


def _tables(directory: Path) -> None:
    """Write tables.md, with a table for each step as in bench/results, and figures.csv.

    Lines of one cell (a combination of settings) are joined. A figure that was measured twice has
    its newer value.
    """
    joined: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text in (directory / "lines.jsonl").read_text().splitlines():
        line = json.loads(text)
        joined.setdefault(tuple(line.get(name) for name in _KEYS), {}).update(line)
    rows = list(joined.values())
    names = list(dict.fromkeys([*_KEYS, *(name for row in rows for name in row)]))
    with (directory / "figures.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    text = ""
    for step in dict.fromkeys(row["step"] for row in rows):
        own = [row for row in rows if row["step"] == step]
        shown = [name for name in names[1:] if any(name in row for row in own)]
        text += f"## {step}\n\n| {' | '.join(shown)} |\n| ---{' | ---:' * (len(shown) - 1)} |\n"
        for row in own:
            text += f"| {' | '.join(_shown(row.get(name, '')) for name in shown)} |\n"
    (directory / "tables.md").write_text(text)
    print(text)


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
