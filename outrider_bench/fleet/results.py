"""A fleet's results: the fleet and its alternatives as a record, tables and plots."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from outrider_bench.console import table_of
from outrider_bench.fleet.layout import lay_out
from outrider_bench.fleet.recorder import PERCENTILES
from outrider_bench.fleet.spec import Fleet
from outrider_bench.simulator import costs

_LATENCIES = [f"{name}_p{p:g}_ms" for name in ("ttft", "tpot") for p in PERCENTILES]
_SAME_SPEED = 1.02
"""Alternatives whose tokens take at most this much longer count as fast as the fleet itself."""


def record(fleet: Fleet, day: dict[str, Any], compared: dict[str, Any]) -> dict[str, Any]:
    """All figures; `compared` has the fleet and its alternatives over the same hours, by name."""
    return {
        "machine": f"simulated by rates and queues; costs: {costs.load(fleet.costs).source}",
        "fleet": fleet.model_dump(mode="json"),
        "day": day,
        "compared": compared,
    }


def compared_record(fleet: Fleet, overall: dict[str, Any]) -> dict[str, Any]:
    """Figures of one of the compared fleets, with the number of its draft processes."""
    drafters = fleet.drafters
    kept = ("tokens_per_s", "under_way", "tpot_mean_ms", *_LATENCIES)
    shares = ("drafter_busy", "bad_link_share", "undrafted_share", "abroad_share")
    what = {"shared_by": drafters.shared_by, "passes": drafters.passes}
    return (
        {"processes": lay_out(fleet).drafter_count}
        | what
        | {name: overall[name] for name in (*kept, *shares)}
    )


def tables(written: dict[str, Any]) -> Iterator[Table]:
    """The day by hour, latencies by region and hour, and the comparison."""
    yield _hours(written["day"]["hours"])
    for name in written["fleet"]["regions"]:
        yield _region(name, written["day"]["hours"])
    yield _comparison(written["compared"])


def _hours(hours: list[dict[str, Any]]) -> Table:
    table = table_of(
        "the fleet by hour (UTC)",
        (
            "hour",
            "tokens/s",
            "requests/s",
            "under way",
            "served abroad",
            "drafters busy",
            "bad links",
            "undrafted",
        ),
    )
    for hour in hours:
        shares = ("abroad_share", "drafter_busy", "bad_link_share", "undrafted_share")
        figures = [f"{hour[name]:,.0f}" for name in ("tokens_per_s", "requests_per_s", "under_way")]
        table.add_row(str(hour["hour"]), *figures, *[f"{hour[name]:.1%}" for name in shares])
    return table


def _region(name: str, hours: list[dict[str, Any]]) -> Table:
    title = f"{name}, its clients' latencies by hour (ms)"
    table = table_of(title, ("hour", "under way", *_labels()))
    for hour in hours:
        region = hour["regions"][name]
        figures = [f"{region[key]:.1f}" if key in region else "–" for key in _LATENCIES]
        table.add_row(str(hour["hour"]), f"{region['under_way']:,.0f}", *figures)
    return table


def _labels() -> list[str]:
    return [key.removesuffix("_ms").replace("_", " ").upper() for key in _LATENCIES]


def _comparison(compared: dict[str, Any]) -> Table:
    table = table_of(
        "the same traffic with other drafters and links",
        (
            "fleet",
            "processes",
            "shared by",
            "TPOT mean (ms)",
            "×",
            *_labels(),
            "under way",
            "busy",
            "undrafted",
        ),
    )
    base = next(iter(compared.values()))["tpot_mean_ms"]
    for name, found in compared.items():
        latencies = [f"{found[key]:.1f}" for key in _LATENCIES]
        speed = [f"{found['tpot_mean_ms']:.2f}", f"{found['tpot_mean_ms'] / base:.3f}"]
        rest = [f"{found['under_way']:,.0f}", *_percent(found, "drafter_busy", "undrafted_share")]
        counts = (str(found["processes"]), str(found["shared_by"]))
        table.add_row(name, *counts, *speed, *latencies, *rest)
    return table


def _percent(found: dict[str, Any], *names: str) -> list[str]:
    return [f"{found[name]:.1%}" for name in names]


def findings(compared: dict[str, Any]) -> Iterator[str]:
    """Sentences that answer what sharing saves and what bad links cost."""
    base_name, base = next(iter(compared.items()))
    limit = _SAME_SPEED * base["tpot_mean_ms"]
    for shared, kind in ((False, "of its own"), (True, "that are shared")):
        enough = [
            found["processes"]
            for found in compared.values()
            if found["processes"]
            and (found["shared_by"] > 1) == shared
            and found["tpot_mean_ms"] <= limit
        ]
        if enough:
            yield (
                f"With drafters {kind}, {min(enough):,} processes give a mean time per token "
                f"within {_SAME_SPEED - 1:.0%} of {base_name}'s ({base['processes']:,} processes)."
            )
    for name, found in compared.items():
        if found is not base:
            ratio = found["tpot_mean_ms"] / base["tpot_mean_ms"] - 1
            tail = found["tpot_p99.9_ms"] / base["tpot_p99.9_ms"] - 1
            yield f"{name}: mean time per token {ratio:+.1%}, its p99.9 {tail:+.1%}."


def plots(written: dict[str, Any]) -> dict[str, bytes]:
    """PNGs by name: load and latencies over the day, and speed by number of processes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    images = {}
    for name, draw in (
        ("day", _plot_day),
        ("latency", _plot_latency),
        ("drafters", _plot_drafters),
    ):
        figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
        draw(axes, written)
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=120, format="png")
        pyplot.close(figure)
        images[name] = buffer.getvalue()
    return images


def _plot_day(axes: Any, written: dict[str, Any]) -> None:
    hours = written["day"]["hours"]
    at = [hour["hour"] for hour in hours]
    names = list(written["fleet"]["regions"])
    under_way = [[hour["regions"][name]["under_way"] for hour in hours] for name in names]
    axes.stackplot(at, under_way, labels=names, alpha=0.6)
    top = 1.3 * max(hour["under_way"] for hour in hours)
    axes.set(xlabel="hour (UTC)", ylabel="requests under way, by serving region", ylim=(0, top))
    axes.legend(loc="lower left", fontsize="small")
    right = axes.twinx()
    rates = [hour["tokens_per_s"] / 1e6 for hour in hours]
    right.plot(at, rates, "k.-", label="tokens/s")
    right.set(ylabel="million tokens/s", ylim=(0, 1.1 * max(rates)))
    right.legend(loc="lower right", fontsize="small")


def _plot_latency(axes: Any, written: dict[str, Any]) -> None:
    hours = written["day"]["hours"]
    at = [hour["hour"] for hour in hours]
    for number, name in enumerate(written["fleet"]["regions"]):
        for percentile, style in zip(PERCENTILES, ("-", "--", ":"), strict=True):
            key = f"tpot_p{percentile:g}_ms"
            values = [hour["regions"][name].get(key) for hour in hours]
            label = f"{name}, p{percentile:g}"
            axes.plot(at, values, style, color=f"C{number}", label=label)
    axes.set(xlabel="hour (UTC)", ylabel="time per output token (ms)", ylim=(0, None))
    axes.legend(fontsize="small", ncols=3)


def _plot_drafters(axes: Any, written: dict[str, Any]) -> None:
    """Speed by number of processes, own or shared, that draft together."""
    own: list[tuple[int, float]] = []
    shared: list[tuple[int, float]] = []
    for name, found in written["compared"].items():
        changes = written["fleet"]["alternatives"].get(name, {})
        if any(path.startswith("links.") for path in changes) or found["passes"] == "in-turn":
            continue
        point = (found["processes"], found["tpot_mean_ms"])
        if found["processes"]:
            (shared if found["shared_by"] > 1 else own).append(point)
    for points, label in ((own, "each verifier its own"), (shared, "shared")):
        if points:
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=label)
    axes.set(xlabel="draft processes", ylabel="mean time per output token (ms)", xscale="log")
    axes.set_ylim(0, None)
    axes.legend(fontsize="small")
