"""The setting that says how many draft tokens a step verifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator

from outrider.errors import OutriderError, invalid
from outrider.limits import MAX_DRAFT_TOKENS

# TensorRT-LLM's AUTO heuristic for n-gram speculation.
_AUTO_SMALL_BATCH, _AUTO_DEEP, _AUTO_SHALLOW, _AUTO_LARGEST_BATCH = 4, 5, 3, 32


@dataclass(frozen=True, slots=True)
class DraftTokensPolicy:
    """How many draft tokens of a sequence a step verifies.

    `goodput` takes what measured acceptance and costs say is fastest, 0 included, up to `max_draft_tokens`; `auto` is TensorRT-LLM's
    heuristic: 5 up to a batch of 4, 3 up to 32, none above; `fixed` always takes `max_draft_tokens`.
    """

    kind: Literal["goodput", "auto", "fixed"] = "goodput"
    max_draft_tokens: int = 8

    @classmethod
    def parse(cls, text: str) -> DraftTokensPolicy:
        """From goodput, goodput:MAX, auto, fixed:K or K; raises OutriderError(INVALID_VALUE)."""
        kind, _, number = text.partition(":")
        if text.isdecimal():
            kind, number = "fixed", text
        if kind == "auto" and not number:
            return cls("auto", _AUTO_DEEP)
        if kind == "goodput" and not number:
            return cls()
        if kind in ("goodput", "fixed") and number.isdecimal() and int(number) <= MAX_DRAFT_TOKENS:
            return cls("fixed" if kind == "fixed" else "goodput", int(number))
        raise invalid(
            "draft_tokens",
            f"must be goodput, goodput:MAX, auto or fixed:K, with at most {MAX_DRAFT_TOKENS}, not {text!r}",
        )

    def limit(self, batch: int) -> int:
        """Most draft tokens of a sequence when `batch` of them decode; prompts do not count, since they come and go."""
        if self.kind != "auto":
            return self.max_draft_tokens
        return (
            0
            if batch > _AUTO_LARGEST_BATCH
            else _AUTO_DEEP
            if batch <= _AUTO_SMALL_BATCH
            else _AUTO_SHALLOW
        )


def _checked(text: object) -> str:
    try:
        DraftTokensPolicy.parse(str(text))
    except OutriderError as error:
        raise ValueError(error.message.removeprefix("draft_tokens ")) from error
    return str(text)


DraftTokensSetting = Annotated[str, BeforeValidator(_checked)]
"""A policy as a setting spells it; a plain number is a fixed depth."""
