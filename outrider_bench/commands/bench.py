"""`outrider lab bench`: its flag, and what it measures."""

from __future__ import annotations

from pathlib import Path

import click

from outrider_bench.commands.entry import entry
from outrider_bench.commands.run import main as run

_MODELS = Path("models/target")
_OUT = Path("bench/out")
_EXPERIMENTS = Path("bench/experiments")


@entry("bench")
@click.option(
    "--only",
    type=click.Choice(["host", "bundled", "grown"]),
    help="Measure one part alone: `host` is the engine's own time for a step with a model that"
    " costs nothing; `bundled` and `grown` are the experiments bundled.yaml and grown.yaml.",
)
def main(only: str | None) -> int:
    """Measure the engine's own time for a step, and each drafter beside plain decoding.

    The experiments with drafters are in bench/experiments; `outrider lab run` takes your own
    experiments. Run this command in the folder of the sources.
    """
    from outrider_bench.console import console_for_output

    if only in (None, "host"):
        from outrider_bench import host_time

        host_time.measure(console_for_output())
    status = 0
    if only in (None, "bundled"):
        status = run([str(_EXPERIMENTS / "bundled.yaml")])
    if only in (None, "grown") and status == 0:
        from outrider_bench.grown import LARGE, grown_checkpoint

        grown_checkpoint(_MODELS, _OUT, LARGE, "bfloat16")
        status = run([str(_EXPERIMENTS / "grown.yaml")])
    return status
