"""The measurements of one load, and the counters of a process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families


@dataclass(slots=True)
class Sample:
    """The measurements of one task. Times are in seconds.

    `ttft` and `tpot` have one entry a request if they are known. `counters` are the growth of the
    verifier's metrics, by metric and labels. `requests`, if known, are the times of a request's
    first and last token and its number of tokens. The batch was full until `full_s`.
    """

    tokens: int
    seconds: float
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    requests: list[tuple[float, float, int]] = field(default_factory=list)
    full_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the seconds from the first request to the last answer."""
        return self.tokens / self.seconds

    @property
    def full_tokens_per_s(self) -> float | None:
        """Tokens/s while the batch was full, or None if unknown.

        Assumes that the tokens of a request arrive evenly.
        """
        if not self.requests or self.full_s <= 0.0:
            return None
        return sum(_tokens_by(self.full_s, *request) for request in self.requests) / self.full_s


def _tokens_by(at: float, first: float, last: float, count: int) -> float:
    if at < first:
        return 0.0
    if at >= last:
        return count
    return 1 + (count - 1) * (at - first) / (last - first)


async def counters(port: int, host: str = "127.0.0.1") -> dict[str, float]:
    """Read a process's Prometheus counters, by name and label of phase, result or drafter."""
    # Reading the system's certificates takes longer than the request, on the measured cores.
    async with httpx.AsyncClient(verify=False) as client:
        text = (await client.get(f"http://{host}:{port}/metrics")).text
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for point in family.samples:
            if key := counter_key(point.name, point.labels):
                values[key] = values.get(key, 0.0) + point.value
    return values


def counter_key(name: str, labels: Mapping[str, str]) -> str:
    """A counter's key: its name and the label of its phase or result.

    Empty if the metric is not a counter.
    """
    if not name.endswith(("_total", "_count", "_sum")):
        return ""
    label = labels.get("phase") or labels.get("result")
    short = name.removeprefix("outrider:").removesuffix("_total")
    if label:
        return f"{short}.{label}"
    return short
