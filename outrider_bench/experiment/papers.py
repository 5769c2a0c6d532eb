"""`outrider experiment papers`: published figures beside theory and the engine-level simulator."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import yaml
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

from outrider.process.usage import invoke
from outrider_bench.experiment.arithmetic import block_efficiency
from outrider_bench.experiment.dsi_pairs import ModelPair, PairPrediction, prediction_of
from outrider_bench.experiment.pearl_pairs import Windowed, WindowPrediction, windows_of
from outrider_bench.experiment.speculation import acceptance_of, dsi_rate, si_rate
from outrider_bench.simulator.costs import Costs, DraftingCost, Forward
from outrider_bench.simulator.scenario import Scenario

DIRECTORY = Path(__file__).parent / "published"
_SECONDS = 400.0
_TOKENS = 2000


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Figure(_Part):
    """A published ratio, or the least and the most of several."""

    what: str
    most: float
    least: float | None = None
    where: str


class Grid(_Part):
    """The points where theory and simulation are compared; a drafter's share is c / v."""

    drafter_shares: list[float]
    acceptances: list[float]
    draft_tokens: list[int]


class Rates(_Part):
    """Published tokens/s on one dataset: SD drafts and verifies in turn, SSD at the same time."""

    dataset: str
    sd: float
    ssd: float


class Published(_Part):
    """The figures that could be found of a paper; `missing` lists the others."""

    paper: str
    address: str
    via: str
    missing: str = ""
    figures: list[Figure] = Field(default_factory=list)
    grid: Grid | None = None
    pairs: list[ModelPair] = Field(default_factory=list)
    pairs_note: str = ""
    """Where the pairs' figures come from, if not from the paper itself."""
    plain_tokens_per_s: float = 0.0
    draft_tokens: dict[str, int] = Field(default_factory=dict)
    draft_token_ms: float = 0.0
    draft_token_note: str = ""
    rows: list[Rates] = Field(default_factory=list)
    windows: list[Windowed] = Field(default_factory=list)


def published(name: str) -> Published:
    """A paper's figures, by the name of its file."""
    return Published.model_validate(yaml.safe_load((DIRECTORY / f"{name}.yaml").read_text()))


# --- simulation ---


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a drafter beside it, with no network between: v and c in seconds."""

    v: float
    c: float
    a: float

    def si(self, k: int) -> float:
        """Simulated tokens/s of the production engine if it waits for k draft tokens each step.

        Like one that shares the target's cores, the drafter does not run ahead.
        """
        return self._simulate(k, in_turn=True)

    def pushed(self, k: int) -> float:
        """As `si`, with a drafter that runs ahead and a planner that waits only if that pays."""
        return self._simulate(k, in_turn=False)

    def _simulate(self, k: int, *, in_turn: bool) -> float:
        from outrider_bench.simulator.simulation import simulate

        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "costs.json"
            file.write_text(self._costs().model_dump_json())
            outcome = simulate(self._scenario(str(file), k, in_turn), 1)
        return outcome.sample.tokens / outcome.sample.seconds

    def _costs(self) -> Costs:
        """Costs in which every forward takes v, as in the papers, and nothing else takes time."""
        return Costs(
            source="a paper",
            measured=False,
            forwards=[Forward(sequences=1, tokens=n, seconds=self.v) for n in (1, 65)],
            prompt_step_s=0.0,
            prompt_token_s=0.0,
            host_step_s=0.0,
            host_sequence_s=0.0,
            drafting={"model": DraftingCost(round_s=0.0, token_s={1: self.c})},
        )

    def _scenario(self, costs: str, k: int, in_turn: bool) -> Scenario:
        drafter = {"name": "drafter", "acceptance": self.a, "round_trip_ms": 0}
        return Scenario.model_validate(
            {
                "costs": costs,
                "seconds": _SECONDS,
                "sequences": [1],
                "prompt_tokens": [1],
                "output_tokens": [_TOKENS],
                "client_ms": 0,
                "drafters": [drafter | {"on_target_cores": in_turn}],
                "draft_tokens": f"fixed:{k}" if in_turn else f"goodput:{k}",
                "always_draft": in_turn,
            }
        )


@dataclass(frozen=True, slots=True)
class Point:
    """A point of DSI's grid: tokens per target forward by theory and simulation."""

    drafter_share: float
    acceptance: float
    draft_tokens: int
    """The number of draft tokens at which SI is fastest."""
    si: float
    simulated_si: float
    dsi: float
    pushed: float


def dsi_points(grid: Grid) -> Iterator[Point]:
    """Theory beside simulation at all points of the grid. A plain forward takes 30 ms."""
    v = 0.03
    for share in grid.drafter_shares:
        for a in grid.acceptances:
            pair = Pair(v, share * v, a)
            k = max(grid.draft_tokens, key=lambda k: si_rate(pair.v, pair.c, pair.a, k))
            dsi = max(dsi_rate(pair.v, pair.c, a, k) for k in grid.draft_tokens)
            rates = (si_rate(v, pair.c, a, k), pair.si(k), dsi, pair.pushed(8))
            yield Point(share, a, k, *[v * rate for rate in rates])


@dataclass(frozen=True, slots=True)
class Prediction:
    """SSD on one dataset: tokens/s."""

    dataset: str
    acceptance: float
    """Inferred from the published rate of SD."""
    sd: float
    simulated_sd: float
    ssd: float
    all_hits: float
    """The rate if the drafter prepared for every outcome of a verification."""
    hit_rate: float
    """The share of outcomes that it prepared for, inferred from the published rate."""
    pushed: float
    """Simulated: one chain that runs ahead and no branches."""


def ssd_predictions(paper: Published) -> Iterator[Prediction]:
    """SSD's rates from SD's published rates, by theory and by the simulator."""
    v = 1.0 / paper.plain_tokens_per_s
    c = paper.draft_token_ms / 1000
    sd_tokens = paper.draft_tokens["sd"]
    ssd_tokens = paper.draft_tokens["ssd"]
    for row in paper.rows:
        a = acceptance_of(row.sd, v, c, sd_tokens)
        pair = Pair(v, c, a)
        tokens = block_efficiency(a, ssd_tokens)
        hits = 1.0 - (tokens / row.ssd - v) / (ssd_tokens * c)
        simulated = pair.si(sd_tokens)
        pushed = pair.pushed(8)
        yield Prediction(row.dataset, a, row.sd, simulated, row.ssd, tokens / v, hits, pushed)


# --- the command ---


def _dsi_table(points: list[Point]) -> Table:
    table = Table(title="SI and DSI: tokens per target forward (1 is plain decoding)")
    names = ("c / v", "a", "k", "SI", "SI, simulated", "error", "DSI, many targets", "DSI / SI")
    for name in (*names, "Outrider, one target", "Outrider / SI"):
        table.add_column(name, justify="right")
    for point in points:
        numbers = (point.si, point.simulated_si)
        error = f"{point.simulated_si / point.si - 1:+.1%}"
        rest = (point.dsi, point.dsi / point.si, point.pushed, point.pushed / point.si)
        where = (f"{point.drafter_share:g}", f"{point.acceptance:g}", str(point.draft_tokens))
        table.add_row(*where, *[f"{n:.2f}" for n in numbers], error, *[f"{n:.2f}" for n in rest])
    return table


def _pairs_table(found: list[PairPrediction], note: str) -> Table:
    table = Table(title=f"DSI over SI ({note})")
    table.add_column("target / drafter, dataset")
    for name in ("published", "their simulation's rules", "error", "theory"):
        table.add_column(name, justify="right")
    for row in found:
        rates = (f"{row.published:.2f}", f"{row.simulated:.2f}")
        table.add_row(row.name, *rates, f"{row.error:+.1%}", f"{row.theory:.2f}")
    return table


def _ssd_table(found: list[Prediction]) -> Table:
    table = Table(title="SSD: tokens/s")
    table.add_column("dataset")
    names = ("a", "SD", "SD, simulated", "SSD", "all hits", "implied hit rate")
    for name in (*names, "Outrider, a chain"):
        table.add_column(name, justify="right")
    for row in found:
        rates = [f"{rate:.0f}" for rate in (row.sd, row.simulated_sd, row.ssd, row.all_hits)]
        last = (f"{row.hit_rate:.2f}", f"{row.pushed:.0f}")
        table.add_row(row.dataset, f"{row.acceptance:.2f}", *rates, *last)
    return table


def _pearl_table(found: list[WindowPrediction]) -> Table:
    table = Table(title="PEARL: speed over plain decoding (* sets the window)")
    table.add_column("target / drafter, dataset")
    for name in ("window", "published", "by theory", "error"):
        table.add_column(name, justify="right")
    for row in found:
        window = f"{row.window}{'*' * row.sets_window}"
        rates = (f"{row.published:.2f}", f"{row.predicted:.2f}")
        table.add_row(row.name, window, *rates, f"{row.error:+.1%}")
    return table


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="File for all figures, as JSON.")
def command(out: Path | None) -> int:
    """Print published figures beside theory and the simulator. docs/papers.md discusses them."""
    papers = {name: published(name) for name in ("dsi", "ssd", "pearl")}
    console = Console() if sys.stdout.isatty() else Console(width=160)
    grid = papers["dsi"].grid
    points = list(dsi_points(grid)) if grid is not None else []
    predictions = list(ssd_predictions(papers["ssd"]))
    pairs = [prediction_of(pair) for pair in papers["dsi"].pairs]
    windows = [found for pair in papers["pearl"].windows for found in windows_of(pair)]
    for name, found in (
        ("dsi", _dsi_table(points)),
        ("ssd", _ssd_table(predictions)),
        ("pearl", _pearl_table(windows)),
    ):
        paper = papers[name]
        console.print(f"\n{paper.paper}, {paper.address}\nfrom {paper.via}", markup=False)
        for figure in paper.figures:
            console.print(f"published: {figure.what}, {_range(figure)} ({figure.where})")
        if paper.missing:
            console.print(f"not compared: {paper.missing}", markup=False)
        console.print(found)
    errors = [abs(point.simulated_si / point.si - 1.0) for point in points]
    console.print(
        f"simulated SI beside theory: median error {median(errors):.2%}, worst {max(errors):.2%}"
    )
    console.print(_pairs_table(pairs, papers["dsi"].pairs_note))
    errors = [abs(pair.error) for pair in pairs]
    console.print(f"DSI over SI: median error {median(errors):.1%}, worst {max(errors):.1%}")
    errors = [abs(found.error) for found in windows if not found.sets_window]
    console.print(f"PEARL: median error {median(errors):.1%}, worst {max(errors):.1%}")
    if out is not None:
        written = {
            "dsi": [asdict(point) for point in points],
            "dsi_pairs": [asdict(pair) for pair in pairs],
            "ssd": [asdict(prediction) for prediction in predictions],
            "pearl": [asdict(found) for found in windows],
        }
        sources: dict[str, Any] = {name: paper.model_dump() for name, paper in papers.items()}
        out.write_text(json.dumps({"published": sources, "found": written}, indent=1))
    return 0


def _range(figure: Figure) -> str:
    if figure.least is None:
        return f"at most {figure.most:.2f}×"
    return f"{figure.least:.2f} to {figure.most:.2f}×"


def main(arguments: list[str]) -> int:
    """The exit status."""
    status: int = invoke(command, "outrider experiment papers", arguments)
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
