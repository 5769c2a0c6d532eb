"""The requests of a workload: prompts and lengths of answers.

All decoding modes, measurements and predictions have the same requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gateway.text.prompts import Prompts
from outrider.errors import OutriderError
from outrider.tokenizer import load_tokenizer
from outrider_bench import prompt_files
from outrider_bench.experiment.spec import Workload
from outrider_bench.prompt_files import Message, Prompt

_GOLDEN = 0.618034
_FEWEST = 8


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    kind: str
    prompt: list[int]
    output_tokens: int
    seed: int | None
    grammar: Mapping[str, Any] | None = None
    """The request's `structured_outputs`. An answer then ends when the grammar's text does."""


class Encoder:
    """Turns prompts into ids as the gateway does for the model in a directory."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._tokenizer = load_tokenizer(str(model))
        self._known: dict[tuple[str, tuple[Message, ...]], list[int]] = {}

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the prompt's ids.

        Raises ValueError for a chat if the model has no chat template.
        """
        key = prompt.text, prompt.chat
        if key not in self._known:
            self._known[key] = self._encode(prompt)
        return self._known[key]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer's ids."""
        return str(self._tokenizer.decode(ids))

    def _encode(self, prompt: Prompt) -> list[int]:
        if not prompt.chat:
            return list(self._tokenizer.encode(prompt.text).ids)
        try:
            text = self._templates.render_blocking(
                [message.model_dump() for message in prompt.chat]
            )
        except OutriderError as error:
            raise ValueError(f"prompts, kind {prompt.kind}: {error.message}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _templates(self) -> Prompts:
        """The templates, which are made at the first chat, since rendering needs processes."""
        return Prompts(str(self._model))


def requests_of(workload: Workload, encoder: Encoder) -> list[Request]:
    """Return the requests in order.

    The last prompt of each kind is reserved for warming up, unless the kind has only one prompt.
    """
    own = _Prompts(workload)
    kinds = own.kinds
    found = []
    count = max(_FEWEST, workload.waves * workload.batch)
    for i, output in enumerate(spread_lengths(workload.output_tokens, count)):
        kind = kinds[i % len(kinds)]
        prompt = own.get(kind, i)
        found.append(request_of(prompt, encoder, output, _seed(workload, i)))
    return found


def warm_up_of(workload: Workload, encoder: Encoder) -> list[Request]:
    """Return requests for warming up, with the prompts that are reserved for it.

    There are two warm-up requests for each request in progress, and at least one of each kind.
    """
    own = _Prompts(workload)
    found = []
    for i in range(max(2 * workload.batch, len(own.kinds))):
        kind = own.kinds[i % len(own.kinds)]
        tokens, seed = workload.output_tokens, _seed(workload, i)
        found.append(request_of(own.kept(kind), encoder, tokens, seed))
    return found


def request_of(prompt: Prompt, encoder: Encoder, output_tokens: int, seed: int | None) -> Request:
    """Return the request that asks for a prompt's answer."""
    ids = encoder.ids(prompt)
    return Request(prompt.kind, ids, output_tokens, seed, prompt.structured_outputs)


def spread_lengths(mean: int, count: int) -> list[int]:
    """Return the lengths of answers, spread evenly from half to one and a half times their mean."""
    return [max(round(mean * (0.5 + (i * _GOLDEN) % 1.0)), 1) for i in range(count)]


class _Prompts:
    """A workload's prompts, keyed by kind."""

    def __init__(self, workload: Workload) -> None:
        self._of_kinds = prompt_files.of(workload.prompts, workload.kinds)
        self.kinds = list(self._of_kinds)

    def get(self, kind: str, i: int) -> Prompt:
        """Return the i-th request's prompt.

        The last prompt of a kind is reserved for warming up, unless the kind has only one prompt.
        """
        usual = self._of_kinds[kind][:-1] or self._of_kinds[kind]
        return usual[i // len(self.kinds) % len(usual)]

    def kept(self, kind: str) -> Prompt:
        """Return the prompt of this kind for warming up."""
        return self._of_kinds[kind][-1]


def _seed(workload: Workload, i: int) -> int | None:
    if workload.seed is None:
        return None
    return workload.seed + i
