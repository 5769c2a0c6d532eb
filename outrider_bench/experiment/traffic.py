"""The requests of a workload: prompts, lengths of answers and times of arrival.

They are the same for every way of decoding, and for measurement and prediction. Knows no processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from outrider_bench.experiment.spec import Workload
from outrider_bench.prompts import KINDS

_GOLDEN = 0.618034
_FEWEST = 8


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    at: float
    """Seconds since the beginning of the traffic; 0 with closed arrivals."""
    kind: str
    prompt: list[int]
    output_tokens: int
    seed: int | None


def requests_of(workload: Workload, tokenizer: Tokenizer, verifier: int = 0) -> list[Request]:
    """The requests for a verifier, by its number from 0, in order of arrival.

    Verifiers that serve together get different prompts and arrivals; verifiers in turn get the
    same. The last prompt of each kind is kept for warming up.
    """
    place = verifier
    if workload.verifiers == "in-turn":
        place = 0
    prompts = _Prompts(workload, tokenizer)
    found = []
    for i, (at, kind, output) in enumerate(_arrivals(workload, place)):
        prompt = prompts.get(kind, i + place * len(workload.kinds))
        found.append(Request(at, kind, prompt, output, _seed(workload, i)))
    return found


def warm_up_of(workload: Workload, tokenizer: Tokenizer) -> list[Request]:
    """Requests to warm up with, whose prompts no measurement has.

    Two for each request under way, and at least one of each kind.
    """
    prompts = _Prompts(workload, tokenizer)
    found = []
    for i in range(max(2 * workload.under_way, len(workload.kinds))):
        kind = workload.kinds[i % len(workload.kinds)]
        prompt = prompts.kept(kind)
        found.append(Request(0.0, kind, prompt, workload.output_tokens, _seed(workload, i)))
    return found


def _arrivals(workload: Workload, place: int) -> Iterator[tuple[float, str, int]]:
    """Time, kind and length of the answer of each request."""
    if workload.arrivals == "closed":
        times = [0.0] * max(_FEWEST, workload.waves * workload.batch)
    else:
        times = list(_poisson(workload, place))
    for i, at in enumerate(times):
        # Lengths are spread evenly from half to one and a half times the mean.
        length = round(workload.output_tokens * (0.5 + (i * _GOLDEN) % 1.0))
        yield at, workload.kinds[i % len(workload.kinds)], max(length, 1)


def _poisson(workload: Workload, place: int) -> Iterator[float]:
    generator = random.Random(1_000 * (workload.seed or 0) + place)
    at = 0.0
    while at < workload.seconds:
        yield at
        at += generator.expovariate(workload.rate)


class _Prompts:
    """Encoded prompts by kind."""

    def __init__(self, workload: Workload, tokenizer: Tokenizer) -> None:
        self._kinds = len(workload.kinds)
        self._encoded = {
            kind: [list(tokenizer.encode(text).ids) for _, text in texts]
            for kind, texts in KINDS.items()
        }

    def get(self, kind: str, i: int) -> list[int]:
        """The prompt of the i-th request."""
        *usual, _ = self._encoded[kind]
        return usual[i // self._kinds % len(usual)]

    def kept(self, kind: str) -> list[int]:
        """The prompt of this kind for warming up."""
        return self._encoded[kind][-1]


def _seed(workload: Workload, i: int) -> int | None:
    if workload.seed is None:
        return None
    return workload.seed + i
