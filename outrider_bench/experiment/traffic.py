"""The requests of a workload: prompts, lengths of answers and times of arrival.

They are the same for every way of decoding, and for measurement and prediction. Knows no processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from tokenizers import Tokenizer

from outrider.launch.prompts import KINDS
from outrider_bench.experiment.spec import Workload, first_problem
from outrider_bench.simulator.traffic import RecordedRequest

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
    same. The last prompt of each kind is kept for warming up. Raises ValueError that names the
    wrong line of a recording.
    """
    place = verifier
    if workload.verifiers == "in-turn":
        place = 0
    prompts = _Prompts(workload, tokenizer)
    found = []
    for i, (at, kind, length, output) in enumerate(_arrivals(workload, place)):
        prompt = prompts.get(kind, i + place * len(workload.kinds), length)
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


def _arrivals(workload: Workload, place: int) -> Iterator[tuple[float, str, int | None, int]]:
    """Time, kind, length of the prompt (None for any) and length of the answer of each request."""
    if workload.recording is not None:
        yield from _recorded(workload.recording, workload)
        return
    if workload.arrivals == "closed":
        times = [0.0] * max(_FEWEST, workload.waves * workload.batch)
    else:
        times = list(_poisson(workload, place))
    for i, at in enumerate(times):
        # Lengths are spread evenly from half to one and a half times the mean.
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
        place = f"workload.recording: {path}, line {number}"
        try:
            found = RecordedRequest.model_validate_json(line)
        except ValidationError as error:
            raise ValueError(f"{place}: {first_problem(error)}") from error
        kind = found.kind or workload.kinds[(number - 1) % len(workload.kinds)]
        if kind not in KINDS:
            raise ValueError(f"{place}: kind must be of {', '.join(KINDS)}, not {kind!r}")
        if found.time < workload.seconds:
            yield found.time, kind, found.prompt_tokens, found.output_tokens


class _Prompts:
    """Encoded prompts by kind."""

    def __init__(self, workload: Workload, tokenizer: Tokenizer) -> None:
        self._kinds = len(workload.kinds)
        self._encoded = {
            kind: [list(tokenizer.encode(text).ids) for _, text in texts]
            for kind, texts in KINDS.items()
        }

    def get(self, kind: str, i: int, length: int | None) -> list[int]:
        """The prompt of the i-th request; cut or repeated to `length` tokens, if given."""
        *usual, _ = self._encoded[kind]
        prompt = usual[i // self._kinds % len(usual)]
        if length is None:
            return prompt
        return (prompt * -(-length // len(prompt)))[:length]

    def kept(self, kind: str) -> list[int]:
        """The prompt of this kind for warming up."""
        return self._encoded[kind][-1]


def _seed(workload: Workload, i: int) -> int | None:
    if workload.seed is None:
        return None
    return workload.seed + i
