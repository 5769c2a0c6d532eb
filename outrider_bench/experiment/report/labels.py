"""Words for a sweep: titles of its paths, and values with units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider_bench.experiment.spec import Drafter, Experiment

_TITLES = {
    "use": "drafter",
    "round_trip_ms": "round trip",
    "jitter_ms": "jitter",
    "mbit_s": "bandwidth",
    "count": "count",
    "output_tokens": "output tokens",
}
_PATH_TITLES = {"target.count": "verifiers", "target.cores": "target's cores"}
# Numbers of these paths need no name beside them.
_PLAIN_UNITS = ("round_trip_ms", "mbit_s")
_UNITS = {"round_trip_ms": "ms", "jitter_ms": "ms", "mbit_s": "Mbit/s", "rate": "requests/s"}


def titles(paths: Sequence[str]) -> dict[str, str]:
    """A short title for each path of a sweep; equal titles name their parent as well."""
    short = {path: _PATH_TITLES.get(path) or _title(path) for path in paths}
    found = {}
    for path, title in short.items():
        parent = path
        if "." in path:
            parent = path.split(".")[-2]
        found[path] = title
        if list(short.values()).count(title) > 1:
            found[path] += f" of {parent}"
    return found


def unit(path: str) -> str:
    """The unit of a path's numbers; empty for counts and shares."""
    return _UNITS.get(_last(path), "")


def words(path: str, value: Any) -> str:
    """A value of a sweep, as tables have it."""
    if isinstance(value, list):
        return " + ".join(map(str, value)) or "none"
    if _last(path) == "mbit_s" and not value:
        return "no limit"
    if isinstance(value, bool | None):
        return {True: "yes", False: "no", None: "unset"}[value]
    if isinstance(value, int | float):
        return f"{value:g} {unit(path)}".strip()
    return str(value)


def point_words(point: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """A cell by its values, such as `model, 20 ms, 100 Mbit/s`."""
    names = titles(list(point))
    shown = []
    for path, value in point.items():
        if path not in without:
            shown.append(_named(names[path], path, value))
    return ", ".join(shown) or "the experiment"


def _named(name: str, path: str, value: Any) -> str:
    """A value with its name, unless its unit or word is enough."""
    if _last(path) == "mbit_s" and not value:
        return "no bandwidth limit"
    if _last(path) in _PLAIN_UNITS or not isinstance(value, bool | int | float):
        return words(path, value)
    return f"{name} {words(path, value)}"


def placement(experiment: Experiment) -> str:
    """The places of a cell's drafters, such as `Unix socket, cores 1`."""
    places = [_place(experiment, experiment.drafters[name]) for name in experiment.use]
    return " + ".join(dict.fromkeys(places)) or "no drafter"


def _place(experiment: Experiment, drafter: Drafter) -> str:
    parts = ["Unix socket" if drafter.transport == "unix" else "TCP"]
    if drafter.link is not None:
        parts.append(f"{experiment.links[drafter.link].round_trip_ms:g} ms")
    if drafter.cores is not None:
        same = drafter.cores == experiment.target.cores
        parts.append("the target's cores" if same else f"cores {drafter.cores}")
    if drafter.device != "cpu":
        parts.append(drafter.device)
    if drafter.host is not None:
        parts.append(f"on {drafter.host}")
    if drafter.pool == "redis":
        parts.append("pool in Redis")
    return ", ".join(parts)


def _title(path: str) -> str:
    return _TITLES.get(_last(path)) or _last(path).replace("_", " ")


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]
