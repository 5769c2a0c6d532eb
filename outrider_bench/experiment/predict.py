"""Simulates an experiment with the costs of a profile, prints a table and writes a plot."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from outrider_bench.console import console_for_output, progress, table_of
from outrider_bench.experiment.cell_scenarios import check, scenario_of, simulated_processes
from outrider_bench.experiment.launches import DRAFT_MODEL
from outrider_bench.experiment.made_profiles import load_profile, profile_of
from outrider_bench.experiment.profile_record import Profile
from outrider_bench.experiment.recording import Recorder
from outrider_bench.experiment.records import (
    DRAFTED,
    PLAIN,
    Folder,
    LinkTraffic,
    Measurement,
    ways_of,
)
from outrider_bench.experiment.report.answers import answers
from outrider_bench.experiment.report.output import write_plot
from outrider_bench.experiment.report.results import read, words
from outrider_bench.experiment.spec import Cell, Experiment, Target, drafters_of, load
from outrider_bench.experiment.traffic import Encoder, requests_of, warm_up_of
from outrider_bench.simulator.simulation import Simulation

PAYS = 1.02
"""Drafting pays if its speed is at least this multiple of the speed of plain decoding."""


def run(file: Path, paths: Sequence[Path], validate: Path | None, out: Path) -> Path:
    """Predict an experiment file, and return the folder with the predictions and their plot.

    `paths` are files of profiles. If `validate` names the folder of a run, the predictions are
    written there and compared with the run. Raises ValueError that names what is wrong.
    """
    console = console_for_output()
    experiment = load(file)
    if experiment.costs:
        profiles = [profile_of(experiment.costs, experiment.target)]
    else:
        profiles = [load_profile(str(path), "--profile") for path in paths]
    folder = _own(out, experiment, profiles) if validate is None else _run(validate, experiment)
    console.print(predict(experiment.cells(), profiles, folder))
    results = read(folder)
    write_plot(results, folder.path / "speed.png", console)
    if validate is not None:
        for sentence in answers(results):
            console.print(f"- {sentence}", markup=False, highlight=False)
    return folder.path


def _run(path: Path, experiment: Experiment) -> Folder:
    """Return the folder of a run of exactly this experiment."""
    folder = Folder(path)
    if not (path / "run.json").is_file():
        raise ValueError(f"--validate: {path} is no folder of a run")
    if folder.about()["experiment"] != experiment.model_dump(mode="json"):
        raise ValueError(f"--validate: {path} is a run of another experiment")
    return folder


def _own(out: Path, experiment: Experiment, profiles: Sequence[Profile]) -> Folder:
    """Return a folder for these profiles and exactly this experiment."""
    names = (
        "".join([profile.model_dump_json() for profile in profiles]) + experiment.model_dump_json()
    )
    folder = Folder(
        out / experiment.name / f"predicted-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
    )
    first = profiles[0]
    wanted = experiment.model_dump(mode="json")
    folder.begin(
        {
            "machine": first.machine,
            "commit": first.commit,
            "experiment": wanted,
            "began": first.measured_at,
        }
    )
    return folder


def predict(cells: Sequence[Cell], profiles: Sequence[Profile], folder: Folder) -> Table:
    """Write a prediction for each cell and decoding mode, and return the table of all predictions.

    Raises ValueError if a cell cannot be predicted.
    """
    folder.note_costs("; ".join([profile.described for profile in profiles]))
    predictor = Predictor(profiles)
    rates: dict[tuple[str, str], float] = {}
    with progress() as bar:
        asked = [(cell, way) for cell in cells for way in ways_of(cell)]
        for cell, way in bar.track(asked, description="simulating"):
            found = predictor.measurement(cell, way)
            folder.save(cell.key, 0, found, predicted=True)
            rates[cell.key, way] = found.sample.tokens_per_s
    return table(cells, rates, predictor)


def table(
    cells: Sequence[Cell], rates: Mapping[tuple[str, str], float], predictor: Predictor
) -> Table:
    """Return a table with a line for each cell, with the spread and the source of its costs.

    `rates` maps a cell and a decoding mode to tokens/s. For each workload, the fastest place has a
    mark, and so does each place that is slower by no more than the factor `spread` or `PAYS`,
    whichever is larger. Places where drafting does not gain this factor have no mark.
    """
    paths = [path.rpartition(".")[2] for path in cells[0].point]
    figures = ("plain, tokens/s", "drafted, tokens/s", "× plain", "", "spread", "costs")
    shown = table_of(cells[0].experiment.question, (*paths, *figures), (*paths, "", "costs"))
    best: dict[str, float] = {}
    for cell in cells:
        gain = rates.get((cell.key, DRAFTED), 0.0) / rates[cell.key, PLAIN]
        workload = cell.experiment.workload.model_dump_json()
        best[workload] = max(best.get(workload, 0.0), gain)
    for cell in cells:
        profile = predictor.profile(cell)
        spread = profile.spread or 1.0
        plain, drafted = rates[cell.key, PLAIN], rates.get((cell.key, DRAFTED), 0.0)
        gain = drafted / plain
        fastest = best[cell.experiment.workload.model_dump_json()]
        shown.add_row(
            *(words(value) for value in cell.point.values()),
            f"{plain:.1f}",
            f"{drafted:.1f}" if drafted else "–",
            f"{gain:.2f}" if drafted else "–",
            "◀" if gain >= max(PAYS, spread, fastest / max(spread, PAYS)) else "",
            f"{spread:.2f}" if profile.spread else "–",
            "measured" if profile.costs.measured else "assumed",
        )
    sources = [profile.described for profile in predictor.profiles]
    shown.caption = (
        "◀ is at the fastest place, and at places that are not shown to be slower. Spread: equal "
        "computations differed by this factor while the costs were measured. "
        f"Costs: {'; '.join(sources)}."
    )
    return shown


@dataclass(slots=True)
class Predictor:
    """Simulates cells: records texts once for each target, and runs equal simulations once."""

    profiles: Sequence[Profile]
    _recorders: dict[str, Recorder] = field(default_factory=dict)
    _encoders: dict[Path, Encoder] = field(default_factory=dict)
    _known: dict[str, Measurement] = field(default_factory=dict)

    def measurement(self, cell: Cell, way: str) -> Measurement:
        """Predict a decoding mode's measurement; equal cells and profiles give equal figures."""
        experiment = cell.experiment
        profile = self.profile(cell)
        # Plain decoding uses no drafters and no links.
        plain = way == PLAIN
        key = experiment.model_dump_json(include={"target", "workload"} if plain else None)
        if key not in self._known:
            self._known[key] = self._simulate(experiment, way, profile)
        found = self._known[key]
        return Measurement(way, found.sample, links=found.links, errors=found.errors)

    def profile(self, cell: Cell) -> Profile:
        """Return the first profile that fits a cell.

        If none fits, raises ValueError with what the first profile lacks.
        """
        first: ValueError | None = None
        for profile in self.profiles:
            try:
                check(cell.experiment, profile)
            except ValueError as error:
                first = first or error
            else:
                return profile
        raise ValueError(f"{cell.key}: {first or 'there is no profile'}") from first

    def _simulate(self, experiment: Experiment, way: str, profile: Profile) -> Measurement:
        encoder = self._encoder(experiment.target)
        warm_up = warm_up_of(experiment.workload, encoder)
        recorder = self._recorder(experiment)
        recording = recorder.record([*warm_up, *requests_of(experiment.workload, encoder)])
        scenario = scenario_of(experiment, way, profile, recording, len(warm_up))
        simulation = Simulation(scenario, scenario.loads[0], drafting=bool(scenario.drafters))
        outcome = simulation.run()
        links = _traffic(experiment, simulation)
        return Measurement(way, outcome.sample, links=links, errors=outcome.errors)

    def _recorder(self, experiment: Experiment) -> Recorder:
        target = experiment.target
        drafts = {
            drafter.family: drafter.model or DRAFT_MODEL
            for _, drafter in drafters_of(experiment)
            if drafter.family == "model"
        }
        key = f"{target.model} {target.dtype} {drafts}"
        # A grown target writes the same texts as its original, which computes the same function.
        return self._recorders.setdefault(key, Recorder(target.model, target.dtype, drafts))

    def _encoder(self, target: Target) -> Encoder:
        if target.model not in self._encoders:
            self._encoders[target.model] = Encoder(target.model)
        return self._encoders[target.model]


def _traffic(experiment: Experiment, simulation: Simulation) -> dict[str, LinkTraffic]:
    """Return the bytes of the connected drafters' streams, keyed by the link that carries them."""
    links: dict[str, LinkTraffic] = {}
    for name, drafter in drafters_of(experiment):
        for process in simulated_processes(name, drafter):
            actor = simulation.drafters.get(process)
            if drafter.link is None or actor is None:
                continue
            traffic = links.setdefault(drafter.link, LinkTraffic())
            up, down = actor.byte_counts
            traffic.up_bytes += up
            traffic.down_bytes += down
            traffic.connection_count += 1
    return links
