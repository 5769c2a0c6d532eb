"""How models write thoughts: one row a format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ThoughtState = Literal["open", "possible", "over"]
"""Whether the answer begins within a thought, may begin with one, or has none."""


@dataclass(frozen=True, slots=True)
class Thought:
    """The marks around a thought, and the text between the thought and the answer."""

    begin: str
    end: str
    after: str = ""

    def state(self, prompt: str, continued: str = "") -> ThoughtState:
        """Where an answer to this prompt begins.

        `continued` is the text of a message that the answer goes on with; empty for none.
        """
        text = prompt.rstrip()
        if text.endswith(self.end):
            # Such as the empty thought of a model that is not to think.
            return "over"
        if text.endswith(self.begin.rstrip()):
            return "open"
        if not continued.strip():
            return "possible"
        return "open" if continued.rfind(self.begin) > continued.rfind(self.end) else "over"


THOUGHTS = {
    "think": Thought("<think>", "</think>"),
    "think_apart": Thought("<think>", "</think>", "\n\n"),
    "brackets": Thought("[THINK]", "[/THINK]"),
    "seed": Thought("<seed:think>", "</seed:think>"),
    "command": Thought("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma_4": Thought("<|channel>thought\n", "<channel|>"),
}
"""All formats by name. The first whose end a chat template shows is the model's."""


def shown_thought(template: str, known: Thought | None) -> Thought | None:
    """The format that a chat template shows, best the `known` one; None for none."""
    marks = THOUGHTS.values() if known is None else (known, *THOUGHTS.values())
    return next((mark for mark in marks if mark.end in template), None)
