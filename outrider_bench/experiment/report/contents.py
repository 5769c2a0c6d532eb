"""The tables of a report: their columns, their lines and notes on how to read them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from outrider_bench.experiment.records import DRAFTED, IDLE, PLAIN
from outrider_bench.experiment.report.labels import titles, words
from outrider_bench.experiment.report.ratios import load_of
from outrider_bench.experiment.report.results import ALL, Results
from outrider_bench.experiment.report.tables import Column, Subject, Table, make
from outrider_bench.experiment.spec import Cell
from outrider_bench.report import LOOKUPS

PHASE_TITLES = {
    "forward": "forward",
    "wait": "wait for a draft",
    "wait_compute": "wait: drafter computing",
    "wait_network": "wait: network",
    "pack": "packing",
    "accept": "acceptance",
    "commit": "commit",
    "send": "sending",
}
"""Words for the phases of a step, in the order of plots and tables."""

_PLAIN_ONCE = "Plain decoding has one line for each target and workload."
_SPEED_NOTE = "Median of the repetitions (range). Ratios are taken within each repetition."
_BASELINE_NOTE = " The baseline is the cell of colocated drafting."
_LATENCY_NOTE = (
    "TPOT is the time per output token of a request, TTFT its time to the first token. "
    "Percentiles are over the requests of a repetition; the median repetition is shown."
)
_DRAFTS_NOTE = (
    "Acceptance rate: accepted of verified draft tokens. Acceptance length: 1 + accepted tokens "
    "per draft. Tokens per forward: tokens that a sequence commits in one forward of the target. "
    "Then shares of commits by the next draft's state: on the chain, in a branch, late, or a "
    "miss. Wasted: draft tokens dropped for each output token."
)
_STEP_NOTE = (
    "Mean milliseconds of an engine step by phase, from the verifier's counters. Where spans were "
    f"recorded, their proportion divides the wait into computing and network. {_PLAIN_ONCE}"
)
_SPANS_NOTE = f"Share of each phase in the time of the OpenTelemetry spans. {_PLAIN_ONCE}"
_COSTS_NOTE = (
    "For each output token: bytes on each link (up is towards the verifier or Redis), CPU time by "
    f"process, and energy where the machine counts it. {_PLAIN_ONCE}"
)
_EVENTS_NOTE = (
    "The longest time without a token, to a tenth of a second. For each event: tokens/s of the two "
    "seconds before it; seconds from it until a whole second begins at 90 % of that rate, a dash "
    "where that did not happen; and how many seconds the full traffic went on after it."
)
_VERIFIERS_NOTE = "Each verifier apart. Verifiers in turn get the same requests."

_SPEED = [
    Column("plain, tokens/s", "tokens_per_s", 1, PLAIN, ranged=True),
    Column("drafted, tokens/s", "tokens_per_s", 1, DRAFTED, ranged=True),
    Column("× plain", "times_plain", 2, DRAFTED, ranged=True),
    Column("× baseline", "times_baseline", 2, DRAFTED, ranged=True),
    Column("idle drafters, × plain", "times_plain", 2, IDLE, ranged=True),
]
_LATENCY = [
    *(
        Column(f"{way}: {name.upper()} p{percentile}, ms", f"{name}_p{percentile}_ms", 1, way)
        for name in ("tpot", "ttft")
        for percentile in (50, 99)
        for way in (PLAIN, DRAFTED)
    ),
    Column("TPOT p50, plain / drafted", "tpot_times_plain", 2, DRAFTED, ranged=True),
]
_DRAFTS = [
    Column("acceptance rate", "acceptance", 2, DRAFTED),
    Column("acceptance length", "accepted_length", 2, DRAFTED),
    Column("tokens per forward", "tokens_per_forward", 2, DRAFTED),
    *(Column(result, f"lookup_{result}", 2, DRAFTED) for result in LOOKUPS),
    Column("wasted drafts per token", "wasted_per_token", 2, DRAFTED),
]
_STEP = [
    Column("step", "step_ms", 2),
    *(Column(title, f"step_{phase}_ms", 2) for phase, title in PHASE_TITLES.items()),
]
_SPANS = [Column(title, f"span_{phase}_share", 3) for phase, title in PHASE_TITLES.items()]
_VERIFIERS = [
    Column("plain, tokens/s", "tokens_per_s", 1, PLAIN),
    Column("drafted, tokens/s", "tokens_per_s", 1, DRAFTED, ranged=True),
    Column("× plain", "times_plain", 2, DRAFTED, ranged=True),
    Column("acceptance rate", "acceptance", 2, DRAFTED),
    Column("tokens per forward", "tokens_per_forward", 2, DRAFTED),
    Column("accepted per forward", "accepted_per_forward", 2, DRAFTED),
    Column("accepted, × first turn", "times_first_turn", 2, DRAFTED, ranged=True),
]
_EVENTS = [
    Column("plain: longest gap, s", "longest_gap_s", 1, PLAIN, ranged=True),
    Column("drafted: longest gap, s", "longest_gap_s", 1, DRAFTED, ranged=True),
    Column("before, tokens/s", "event_{event}_before_tokens_per_s", 1, DRAFTED),
    Column("back after, s", "event_{event}_recovery_s", 1, DRAFTED, ranged=True),
    Column("watched, s", "event_{event}_watched_s", 1, DRAFTED),
]


def tables(results: Results) -> Iterator[Table]:
    """All tables that the run has figures for."""
    heads = list(titles(list(results.experiment.sweep)).values()) or ["cell"]
    by_way = [*heads, "way"]
    by_verifier = [*heads, "verifier"]
    by_event = [*heads, "event"]
    step_title = "Where the time of a step went, ms"
    spans_title = "Where the time of a step went, by spans"
    speed_note = _SPEED_NOTE
    if results.experiment.baseline:
        speed_note += _BASELINE_NOTE
    cells = _by_cell(results)
    ways = _by_way(results)
    verifiers = Table("verifiers", "Verifiers", _VERIFIERS_NOTE, by_verifier)
    for table, columns, subjects in (
        (Table("speed", "Speed", speed_note, heads), _SPEED, cells),
        (Table("latency", "Latency", _LATENCY_NOTE, heads), _LATENCY, cells),
        (Table("drafts", "Drafts", _DRAFTS_NOTE, heads), _DRAFTS, cells),
        (Table("step", step_title, _STEP_NOTE, by_way), _STEP, ways),
        (Table("spans", spans_title, _SPANS_NOTE, by_way), _SPANS, ways),
        (Table("costs", "What a token costs", _COSTS_NOTE, by_way), _costs(results), ways),
        (Table("events", "Events", _EVENTS_NOTE, by_event), _EVENTS, _by_event(results)),
        (verifiers, _VERIFIERS, _by_verifier(results)),
    ):
        yield from make(results, table, columns, subjects)


def event_words(event: Mapping[str, Any]) -> str:
    """An event in short, such as `stop of near at 2 s`."""
    return f"{event['what']} of {event['who']} at {event['at']:.3g} s"


def _costs(results: Results) -> list[Column]:
    """Columns for the links and processes of this run."""
    columns = []
    for name in dict.fromkeys(name for row in results.rows for name in row.figures):
        if link := re.fullmatch(r"link_(.+)_(up|down)_bytes_per_token", name):
            columns.append(Column(f"{link[1]} {link[2]}, bytes", name, 0))
        elif process := re.fullmatch(r"cpu_(.+)_ms_per_token", name):
            columns.append(Column(f"CPU {process[1]}, ms", name, 2))
    columns.append(Column("CPU in all, ms", "cpu_ms_per_token", 2))
    columns.append(Column("power, W", "watts", 1))
    columns.append(Column("energy, J", "joules_per_token", 3))
    return columns


def _by_cell(results: Results) -> list[Subject]:
    """A line for each cell, whose columns name their way."""
    return [Subject(_heads(cell), cell, source, "", ALL) for cell, source in results.found()]


def _by_way(results: Results) -> list[Subject]:
    """A line for each way of each cell, but one line of plain decoding for each load."""
    found, seen = [], set()
    for cell, source in results.found():
        for way in (PLAIN, DRAFTED):
            place = (cell.key, way)
            if way == PLAIN:
                place = (load_of(cell), way)
            rows = [row for row in results.rows if (row.cell, row.way) == (cell.key, way)]
            if rows and place not in seen:
                seen.add(place)
                found.append(Subject([*_heads(cell), way], cell, source, way, ALL))
    return found


def _by_verifier(results: Results) -> list[Subject]:
    """A line for each verifier of cells that have several."""
    found = []
    for cell, source in results.found():
        own = [row for row in results.rows if (row.cell, row.source) == (cell.key, source)]
        numbers = list(dict.fromkeys(row.verifier for row in own if row.verifier != ALL))
        if len(numbers) > 1:
            found += [Subject([*_heads(cell), n], cell, source, "", n) for n in numbers]
    return found


def _by_event(results: Results) -> list[Subject]:
    """A line for each event of each cell."""
    return [
        Subject([*_heads(cell), event_words(event)], cell, source, "", ALL, number)
        for cell, source in results.found()
        for number, event in enumerate(results.events(cell, source), 1)
    ]


def _heads(cell: Cell) -> list[str]:
    return [words(path, value) for path, value in cell.point.items()] or ["the experiment"]
