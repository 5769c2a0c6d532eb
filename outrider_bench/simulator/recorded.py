"""Recorded traffic: a file with a request per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator


class RecordedRequest(BaseModel):
    """A line of a recording."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    time: float = Field(0.0, ge=0)
    """When the request comes, in seconds; closed arrivals ignore it."""
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    kind: str = ""
    tenant: str = ""
    count: Annotated[int, Field(ge=1)] = 1
    """Number of equal requests that the line stands for, `every` seconds apart."""
    every: Annotated[float, Field(ge=0)] = 0.0
    choices: Annotated[int, Field(ge=1)] = 1
    """The request's `n`: sequences with the same prompt."""
    reads: bool = True
    """True if the request's client reads the answer."""
    guesses: dict[str, Annotated[str, StringConstraints(pattern=r"^[+.1-9-]*$")]] = Field(
        default_factory=dict
    )
    """Keyed by drafter, a character for each token of the output, given the tokens before it: + if
    the drafter guesses the token, - if it guesses another token, 1 to 9 if the token is the
    alternative to its guess with this number (for `drafts_by: model`), and . if it has no guess.
    The scenario's acceptance of such a drafter is ignored."""
    grammar: bool = False
    """True if the request has a grammar. Some drafters draft for no other requests."""
    prompt_ids: list[int] = Field(default_factory=list)
    """The prompt's tokens. Drafters with `drafts_by: lookup` need these and `output_ids`."""
    output_ids: list[int] = Field(default_factory=list)
    """The target's tokens after the prompt. There may be more than `output_tokens`, for drafts
    beyond the end."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        wanted = self.prompt_tokens
        found = len(self.prompt_ids)
        if found and found != wanted:
            raise ValueError(f"prompt_ids must have the {wanted} of prompt_tokens, not {found}")
        if found and len(self.output_ids) < self.output_tokens:
            wanted = self.output_tokens
            raise ValueError(f"output_ids must have at least the {wanted} of output_tokens")
        return self


def read_recording(path: Path) -> Iterator[RecordedRequest]:
    """Read the requests of a file, line by line.

    Raises ValueError that names the line of an invalid request.
    """
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                found = RecordedRequest.model_validate(json.loads(line))
            except ValueError as error:
                raise ValueError(f"recording: line {number} of {path}: {error}") from error
            for i in range(found.count):
                later = {"time": found.time + i * found.every, "count": 1}
                yield found.model_copy(update=later)
