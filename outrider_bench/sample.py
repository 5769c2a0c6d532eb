"""The measurements of one load, and the counters of a process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

PER_POSITION = "spec_decode_num_accepted_tokens_per_pos."
"""Prefix of the keys that count accepted draft tokens by position in the draft, counted from 0."""


@dataclass(slots=True)
class Sample:
    """The measurements of one load. Times are in seconds.

    `ttft` and `tpot` have an entry per request if they are known. `counters` are the increases of
    the verifier's metrics, keyed by `counter_keys`. `requests`, if known, has an entry per request:
    the times of its first and last token, and its number of tokens. The batch was full until
    `full_s`. `by_kind` maps each kind of prompt to the counters of the drafts for its prompts.
    These counters have the same keys as in `counters`.
    """

    tokens: int
    seconds: float
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    requests: list[tuple[float, float, int]] = field(default_factory=list)
    full_s: float = 0.0
    by_kind: dict[str, dict[str, float]] = field(default_factory=dict)

    def count_drafts(self, kind: str, draft_token_count: int, histogram: Sequence[int]) -> None:
        """Count the drafts of a request under the kind of its prompt.

        `histogram[i]` counts the drafts of which i tokens were accepted.
        """
        own = self.by_kind.setdefault(kind, {})
        counted = {
            "spec_decode_num_drafts": sum(histogram),
            "spec_decode_num_draft_tokens": draft_token_count,
            "spec_decode_num_accepted_tokens": sum(i * n for i, n in enumerate(histogram)),
            **{f"{PER_POSITION}{i}": sum(histogram[i + 1 :]) for i in range(len(histogram) - 1)},
        }
        for key, count in counted.items():
            own[key] = own.get(key, 0.0) + count

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, from the first request to the last answer."""
        return self.tokens / self.seconds

    @property
    def full_tokens_per_s(self) -> float | None:
        """Tokens/s while the batch was full, or None if unknown.

        The figure assumes that the tokens of a request arrive evenly.
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


async def counters(port: int) -> dict[str, float]:
    """Return the Prometheus counters of a local process, keyed by `counter_keys`."""
    # Reading the system's certificates would occupy the measured cores for longer than the request.
    async with httpx.AsyncClient(verify=False) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for point in family.samples:
            for key in counter_keys(point.name, point.labels):
                values[key] = values.get(key, 0.0) + point.value
    return values


def counter_keys(name: str, labels: Mapping[str, str]) -> list[str]:
    """Return a counter's keys. The first is its name with its label for phase, result or position.

    Counters of drafts have a second key, with the drafter's family before it, as in
    `ngram:spec_decode_num_drafts`. The list is empty if the metric is not a counter.
    """
    if not name.endswith(("_total", "_count", "_sum")):
        return []
    label = labels.get("phase") or labels.get("result") or labels.get("position")
    key = name.removeprefix("outrider:").removesuffix("_total")
    if label:
        key = f"{key}.{label}"
    if "family" in labels and key.startswith("spec_decode"):
        return [key, f"{labels['family']}:{key}"]
    return [key]
