"""The requests of a workload: which prompts, how long the answers are, and when they come. The same for every way of decoding.

Knows no processes. Measurement and prediction both take their requests from here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from tokenizers import Tokenizer

from bench.experiment.spec import Workload
from bench.simulator.traffic import RecordedRequest
from outrider.launch.prompts import KINDS

_GOLDEN = 0.618034
_FEWEST = 8


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `at` is when it comes, in seconds after the first one could; 0 with closed arrivals."""

    at: float
    kind: str
    prompt: list[int]
    output_tokens: int
    seed: int | None


def requests_of(workload: Workload, tokenizer: Tokenizer, verifier: int = 0) -> list[Request]:
    """The requests for a verifier by its place, in the order in which they come.

    Verifiers that serve together get different prompts and arrivals; verifiers in turn get the same. The last prompt of
    each kind is kept for warming up. Raises ValueError that names the recording and the line where it is no recording.
    """
    place = 0 if workload.verifiers == "in-turn" else verifier
    prompts = _Prompts(workload, tokenizer)
    return [
        Request(
            at,
            kind,
            prompts.get(kind, i + place * len(workload.kinds), length),
            output,
            _seed(workload, i),
        )
        for i, (at, kind, length, output) in enumerate(_arrivals(workload, place))
    ]


def warm_up_of(workload: Workload, tokenizer: Tokenizer) -> list[Request]:
    """Requests with prompts that no measurement has, two for each under way and at least one of each kind."""
    prompts = _Prompts(workload, tokenizer)
    under_way = workload.batch if workload.arrivals == "closed" else 1
    kinds = [
        workload.kinds[i % len(workload.kinds)]
        for i in range(max(2 * under_way, len(workload.kinds)))
    ]
    return [
        Request(0.0, kind, prompts.kept(kind), workload.output_tokens, _seed(workload, i))
        for i, kind in enumerate(kinds)
    ]


def _arrivals(workload: Workload, place: int) -> Iterator[tuple[float, str, int | None, int]]:
    """When, of which kind, with how long a prompt if that is said, and how long an answer."""
    if workload.recording is not None:
        yield from _recorded(workload.recording, workload)
        return
    if workload.arrivals == "closed":
        times = [0.0] * max(_FEWEST, workload.waves * workload.batch)
    else:
        times = list(_poisson(workload, place))
    for i, at in enumerate(times):
        # Spread evenly from half to one and a half times the mean.
        length = round(workload.output_tokens * (0.5 + (i * _GOLDEN) % 1.0))
        yield at, workload.kinds[i % len(workload.kinds)], None, max(length, 1)


def _poisson(workload: Workload, place: int) -> Iterator[float]:
    generator = random.Random(1_000 * (workload.seed or 0) + place)
    at = 0.0
    while at < workload.seconds:
        yield at
        at += generator.expovariate(workload.rate)


def _recorded(path: Path, workload: Workload) -> Iterator[tuple[float, str, int | None, int]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            found = RecordedRequest.model_validate_json(line)
        except ValidationError as error:
            raise ValueError(
                f"workload.recording: {path}, line {number}: {error.errors()[0]['msg']}"
            ) from error
        kind = found.kind or workload.kinds[(number - 1) % len(workload.kinds)]
        if kind not in KINDS:
            known = ", ".join(KINDS)
            raise ValueError(
                f"workload.recording: {path}, line {number}: kind must be of {known}, not {kind!r}"
            )
        if found.time < workload.seconds:
            yield found.time, kind, found.prompt_tokens, found.output_tokens


class _Prompts:
    """Encoded prompts by kind, in turn."""

    def __init__(self, workload: Workload, tokenizer: Tokenizer) -> None:
        self._kinds = len(workload.kinds)
        self._encoded = {
            kind: [list(tokenizer.encode(text).ids) for _, text in texts]
            for kind, texts in KINDS.items()
        }

    def get(self, kind: str, i: int, length: int | None) -> list[int]:
        """That of the i-th request; cut, or repeated, to `length` tokens if that is given."""
        *usual, _ = self._encoded[kind]
        prompt = usual[i // self._kinds % len(usual)]
        if length is None:
            return prompt
        return (prompt * -(-length // len(prompt)))[:length]

    def kept(self, kind: str) -> list[int]:
        """That which is kept for warming up."""
        return self._encoded[kind][-1]


def _seed(workload: Workload, i: int) -> int | None:
    return None if workload.seed is None else workload.seed + i
