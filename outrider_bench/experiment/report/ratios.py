"""Ratios of figures within one repetition: × plain, × baseline and × the first turn.

A machine is faster in some repetitions than in others, so ratios across repetitions mean less.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from outrider_bench.experiment.records import DRAFTED, PLAIN
from outrider_bench.experiment.report.results import ALL, Results, Row
from outrider_bench.experiment.spec import Cell

_RATE = "tokens_per_s"
_TPOT = "tpot_p50_ms"
_ACCEPTED = "accepted_per_forward"


def add_ratios(results: Results) -> None:
    """Add `times_plain`, `times_baseline`, `times_first_turn` and `tpot_times_plain` to the rows.

    `tpot_times_plain` is plain decoding's time per output token over that of the row, so that more
    is better in all of them.
    """
    rows = {_place(row): row for row in results.rows}
    alike = _alike(results.cells)
    in_turn = {c.key for c in results.cells if c.experiment.workload.verifiers == "in-turn"}
    bases = {cell.key: baseline_of(results, cell) for cell in results.cells}
    for row in results.rows:
        if row.way != PLAIN:
            plain = _plain(rows, row, alike[row.cell], _RATE)
            _add(row, "times_plain", _RATE, plain)
            _add_speedup(row, _plain(rows, row, alike[row.cell], _TPOT))
        base = bases[row.cell]
        if base is not None and row.way == DRAFTED:
            _add(row, "times_baseline", _RATE, _figure(rows, replace(row, cell=base.key), _RATE))
        if row.cell in in_turn and row.verifier != ALL:
            first = _figure(rows, replace(row, verifier="1"), _ACCEPTED)
            _add(row, "times_first_turn", _ACCEPTED, first)


def baseline_of(results: Results, cell: Cell) -> Cell | None:
    """The baseline cell to compare `cell` with.

    It agrees with `cell` on all paths that the baseline does not fix. Without such a cell it is the
    only baseline cell, if there is one.
    """
    bases = [other for other in results.cells if other.is_baseline]
    wanted = {**cell.point, **results.experiment.baseline}
    for base in bases:
        if base.point == wanted:
            return base
    if len(bases) == 1:
        return bases[0]
    return None


def _plain(
    rows: dict[tuple[str, ...], Row], row: Row, alike: list[str], figure: str
) -> float | None:
    """A figure of plain decoding in the same repetition.

    Links and drafters do not change plain decoding. So a cell without a figure of plain decoding
    takes the median of the cells with the same target and workload.
    """
    own = _figure(rows, replace(row, way=PLAIN), figure)
    if own is not None:
        return own
    others = [_figure(rows, replace(row, way=PLAIN, cell=key), figure) for key in alike]
    known = [value for value in others if value is not None]
    if not known:
        return None
    return median(known)


def _alike(cells: list[Cell]) -> dict[str, list[str]]:
    """For each cell, by key, those with the same target and workload."""
    loads: dict[str, list[str]] = {}
    for cell in cells:
        loads.setdefault(load_of(cell), []).append(cell.key)
    return {cell.key: loads[load_of(cell)] for cell in cells}


def load_of(cell: Cell) -> str:
    """A key of target and workload, equal for cells with the same plain decoding."""
    return cell.experiment.model_dump_json(include={"target", "workload"})


def _place(row: Row) -> tuple[str, ...]:
    return row.cell, row.source, row.way, str(row.repetition), row.verifier


def _figure(rows: dict[tuple[str, ...], Row], like: Row, figure: str) -> float | None:
    found = rows.get(_place(like))
    if found is not None:
        return found.figures.get(figure)
    return None


def _add_speedup(row: Row, plain_ms: float | None) -> None:
    own_ms = row.figures.get(_TPOT)
    if plain_ms and own_ms:
        row.figures["tpot_times_plain"] = plain_ms / own_ms


def _add(row: Row, name: str, figure: str, base: float | None) -> None:
    if base and figure in row.figures:
        row.figures[name] = row.figures[figure] / base
