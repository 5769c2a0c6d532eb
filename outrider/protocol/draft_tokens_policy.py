"""The setting `--draft-tokens`: how many draft tokens a step verifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator

from outrider.errors import OutriderError, invalid
from outrider.protocol.limits import MAX_DRAFT_TOKENS

# TensorRT-LLM's AUTO heuristic for n-gram speculation.
_AUTO_SMALL_BATCH = 4
_AUTO_SMALL_BATCH_TOKENS = 5
_AUTO_LARGE_BATCH = 32
_AUTO_LARGE_BATCH_TOKENS = 3


@dataclass(frozen=True, slots=True)
class DraftTokensPolicy:
    """The rule for the number of a sequence's draft tokens that a step verifies.

    `goodput` takes the number from 0 to `max_draft_tokens` that promises the highest goodput, by
    measured acceptance and costs. `auto` is TensorRT-LLM's heuristic: 5 for batches of up to 4
    sequences, 3 for up to 32, and 0 for larger ones. `fixed` always takes `max_draft_tokens`.
    """

    kind: Literal["goodput", "auto", "fixed"] = "goodput"
    max_draft_tokens: int = 8

    @classmethod
    def parse(cls, text: str) -> DraftTokensPolicy:
        """Parse goodput, goodput:MAX, auto, fixed:K or K; raise OutriderError(INVALID_VALUE)."""
        kind, _, number = text.partition(":")
        if text.isdecimal():
            kind, number = "fixed", text
        if kind == "auto" and not number:
            return cls("auto", _AUTO_SMALL_BATCH_TOKENS)
        if kind == "goodput" and not number:
            return cls()
        if number.isdecimal() and int(number) <= MAX_DRAFT_TOKENS:
            if kind == "fixed":
                return cls("fixed", int(number))
            if kind == "goodput":
                return cls("goodput", int(number))
        forms = "goodput, goodput:MAX, auto or fixed:K"
        message = f"must be {forms}, with at most {MAX_DRAFT_TOKENS}, not {text!r}"
        raise invalid("draft_tokens", message)

    def limit(self, batch: int) -> int:
        """Return the maximum number of draft tokens of a sequence in a batch of `batch` sequences.

        Prompts do not count towards the batch, because they come and go.
        """
        if self.kind != "auto":
            return self.max_draft_tokens
        if batch > _AUTO_LARGE_BATCH:
            return 0
        if batch > _AUTO_SMALL_BATCH:
            return _AUTO_LARGE_BATCH_TOKENS
        return _AUTO_SMALL_BATCH_TOKENS


def _checked(text: object) -> str:
    try:
        DraftTokensPolicy.parse(str(text))
    except OutriderError as error:
        raise ValueError(error.message.removeprefix("draft_tokens ")) from error
    return str(text)


DraftTokensSetting = Annotated[str, BeforeValidator(_checked)]
"""The text of a policy in a settings class, checked. A plain number means `fixed`."""
