"""The report as one HTML page that loads no other file: pictures and CSV are inlined."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from outrider_bench.experiment.report.results import Results
from outrider_bench.experiment.report.tables import Table

if TYPE_CHECKING:
    # Without the extra `bench` there is no matplotlib, which this module loads.
    from outrider_bench.experiment.report.drawing import Picture

_UNKNOWN = "not recorded"


def render(
    results: Results,
    answer: list[str],
    tables: list[Table],
    pictures: list[Picture],
    figures_csv: str,
    files: list[str],
) -> str:
    """The page. `files` are paths of raw files, relative to the page."""
    environment = Environment(
        loader=PackageLoader("outrider_bench.experiment.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    environment.filters["bound"] = _bound
    return environment.get_template("page.html").render(
        experiment=results.experiment,
        answer=answer,
        facts=facts(results),
        tables=tables,
        pictures=pictures,
        figures_csv=figures_csv.encode(),
        files=files,
        predicted=any(row.source == "predicted" for row in results.rows),
    )


def facts(results: Results) -> list[tuple[str, str]]:
    """The run's machine, commit, date, command and size, by name."""
    about = results.about
    sources = dict.fromkeys(source for _, source in results.measurements)
    repetitions = [len({repetition for repetition, _ in m}) for m in results.measurements.values()]
    least, most = min(repetitions), max(repetitions)
    return [
        ("figures", " and ".join(sources)),
        ("machine", _machine(about.get("machine") or {})),
        ("commit", str(about.get("commit") or _UNKNOWN)),
        ("date", str(about.get("began") or _UNKNOWN)),
        ("command", str(about.get("command") or _UNKNOWN)),
        ("cells", f"{len(results.found())} of {len(results.cells)}"),
        ("repetitions", str(most) if least == most else f"{least}–{most}"),
    ]


def _bound(text: str) -> str:
    """Keep numbers and their units on one line."""
    return re.sub(r"(\d) (ms|s|%|×|Mbit/s)(?=\W|$)", "\\1\N{NO-BREAK SPACE}\\2", text)


def _machine(machine: Mapping[str, Any]) -> str:
    if not machine:
        return _UNKNOWN
    cores = machine.get("cores") or []
    nodes = machine.get("numa_nodes") or {}
    plural = ""
    if len(nodes) != 1:
        plural = "s"
    parts = [
        str(machine.get("host", "")),
        str(machine.get("processor", "")),
        f"{len(cores)} cores in {len(nodes)} NUMA node{plural}",
        f"{machine.get('memory_bytes', 0) / 2**30:.0f} GiB of memory",
    ]
    speed = machine.get("memory_bytes_per_s") or 0.0
    if speed:
        parts.append(f"{speed / 1e9:.1f} GB/s read by one thread")
    parts.append(", ".join(machine.get("gpus") or []) or "no GPU")
    versions = {"Linux": "kernel", "Python": "python", "PyTorch": "torch"}
    parts += [f"{name} {machine[key]}" for name, key in versions.items() if machine.get(key)]
    return "; ".join(part for part in parts if part)
