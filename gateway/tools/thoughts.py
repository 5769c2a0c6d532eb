"""A table of the formats in which models write thoughts: a row for each format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ThoughtState = Literal["open", "possible", "over"]
"""Whether the answer begins within a thought, may begin with a thought, or has none."""


@dataclass(frozen=True, slots=True)
class Thought:
    """The marks around a thought, and the text between the thought and the answer."""

    begin: str
    end: str
    after: str = ""
    is_message: bool = False
    """True if thought, content and calls are messages of one answer, as in harmony.

    The end mark of a thought then begins the next message, as the prompt's end does. `after` begins
    a message of content, with or without a thought before it. An answer may have several thoughts.
    """

    @property
    def shown(self) -> str:
        """A text that is in the chat templates of models with such thoughts."""
        return self.begin if self.is_message else self.end

    def state(self, prompt: str, continued: str = "") -> ThoughtState:
        """Return the state in which an answer to this prompt begins.

        `continued` is the text of a message that the answer continues; empty for none.
        """
        text = prompt.rstrip()
        if text.endswith(self.end) and not self.is_message:
            # For example, a template ends the prompt with an empty thought to turn thinking off.
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
    "harmony": Thought(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        "<|channel|>final<|message|>",
        is_message=True,
    ),
}
"""All formats, keyed by name. The model has the first format that its chat template shows."""


def shown_thought(template: str, known: Thought | None) -> Thought | None:
    """Return the format that a chat template shows, preferably `known`; None if it shows none."""
    marks = THOUGHTS.values() if known is None else (known, *THOUGHTS.values())
    return next((mark for mark in marks if mark.shown in template), None)
