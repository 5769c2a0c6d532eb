"""Splits a model's answer into content, thought and calls while it grows.

The answer's grammar forces the texts around a call, so the reader expects exactly these texts. It
does not look for them within a call's arguments. Within a thought it looks only for the thought's
end, and for the beginning of a call, which also ends the thought. Stop strings apply only to
content.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from gateway.tools.arguments import ArgumentReader, argument_reader
from gateway.tools.formats import CallMarks, ToolFormat
from gateway.tools.thoughts import Thought

_LETTERS = string.ascii_letters + string.digits
# A text that begins like a call but has this many characters without becoming a call is content.
_LONGEST_BEGIN = 1024


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the answer's thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call of a tool. Calls of an answer are numbered from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. All pieces together are a JSON object."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments


@dataclass(frozen=True, slots=True)
class Reading:
    """The description of what an answer may hold besides content."""

    form: ToolFormat | None = None
    """The format of the answer's calls; None if it holds no calls."""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Maps a tool's name to the schema of its arguments."""
    thought: Thought | None = None
    """The marks of the answer's thought; None if it holds no thought."""
    begins_in_thought: bool = False
    """True if the prompt contains the beginning of the thought."""
    shows_thought: bool = True
    """True if the thought is a part of the answer. It is left out otherwise."""
    is_either: bool = False
    """True if the answer is either only calls or only content."""
    is_forced: bool = False
    """True if the answer holds nothing but calls, and perhaps a thought before them."""
    is_bound: bool = False
    """True if all text after the thought is content, because a grammar binds it."""
    held: frozenset[str] = frozenset()
    """The tools whose arguments the grammar always holds to their schemas. If a call is forced, the
    grammar does so for all tools.
    """
    first_call: int = 0
    """The number of calls in the conversation before this answer."""

    @property
    def literals(self) -> tuple[str, ...]:
        """All strings that the reader looks for."""
        thought = self.thought
        of_thought = () if thought is None else (thought.begin, thought.end, thought.after)
        return (*of_thought, *(() if self.form is None else self.form.literals))


class AnswerReader:
    """Splits one answer into parts."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._buffer = ""
        # Blanks that belong to the content only if more content follows, or line breaks that belong
        # to the thought only if it goes on. There may be thousands of pieces.
        self._blanks: list[str] = []
        # True if line breaks that follow belong to the layout, as after a thought.
        self._trims = reading.begins_in_thought
        self._arguments: ArgumentReader | None = None
        self._marks: CallMarks | None = None
        self._section_end = ""
        # True if text within a thought may be the beginning of a call, which would end the thought.
        self._ends_thought = False
        self._thought_may_begin = reading.thought is not None and not reading.begins_in_thought
        # True if a message of content may begin.
        self._message_may_begin = reading.thought is not None and reading.thought.is_message
        self._call_count = 0
        self._step: Callable[[list[Part]], bool] = self._content
        if reading.begins_in_thought:
            self._step = self._thought
        form = reading.form
        self._begins = [] if form is None else [(_pattern(m), m) for m in form.calls]

    @property
    def call_count(self) -> int:
        """The number of calls that have started."""
        return self._call_count

    def push(self, text: str) -> list[Part]:
        """Add text, and return the parts that are certain."""
        self._buffer += text
        parts: list[Part] = []
        while self._buffer and self._step(parts):
            pass
        return joined(parts)

    def place(self, text: str) -> str | None:
        """Add text, and return the field of the answer's message to which the text belongs.

        A call's field is tool_calls[0] and so on, also for the marks around the call. Return None
        for blanks and possible beginnings of a mark: they belong to the field of the text after
        them.
        """
        before = self._place
        parts = self.push(text)
        if before not in (None, "content"):
            # The mark that ends a thought or a call belongs to it.
            return before
        return self._place or ("content" if parts else None)

    @property
    def _place(self) -> str | None:
        """Return the field of the next text; None while the field is undecided."""
        if self._step == self._thought:
            return "reasoning_content"
        if self._step == self._plain:
            return "content"
        if self._step == self._content:
            is_open = self._buffer or self._blanks or self._trims
            return None if is_open else "content"
        if self._ends_thought or self._step == self._after:
            return None
        if self._section_end and self._call_count and self._step == self._call:
            # Another call may begin here, or the section may end.
            return None
        is_past_call = self._step in (self._read_arguments, self._call_end)
        return f"tool_calls[{self._call_count - is_past_call}]"

    @property
    def _may_be_content(self) -> bool:
        """Return whether a call that has started may be content after all."""
        return self._may_be_other and not (self._section_end or self._reading.is_forced)

    def finish(self) -> list[Part]:
        """Return the text that was held back. Call it once, after the last text."""
        parts: list[Part] = []
        if self._step == self._thought:
            self._add_reasoning(self._buffer, parts)
        elif self._step in (self._content, self._plain) and not self._reading.is_forced:
            self._add_content(self._buffer, parts)
            # Blanks next to calls are layout. An answer without calls keeps its blanks.
            if self._blanks and not self._call_count:
                parts.append(Content("".join(self._blanks)))
        elif self._step == self._call and self._may_be_content:
            self._no_call(parts)
            return joined([*parts, *self.finish()])
        # Any other text that is left was cut off within a call or its marks, and means nothing.
        self._buffer = ""
        return joined(parts)

    def _thought(self, parts: list[Part]) -> bool:
        """Take the thought up to its end mark, or to a call."""
        assert self._reading.thought is not None
        end = self._reading.thought.end
        marks = [end] if self._reading.form is None else [end, self._reading.form.trigger]
        found = [(at, mark) for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if not found:
            certain = _held_from(self._buffer, marks)
            self._add_reasoning(self._buffer[:certain], parts)
            self._buffer = self._buffer[certain:]
            return False
        at, mark = min(found)
        self._add_reasoning(self._buffer[:at], parts)
        self._buffer = self._buffer[at:]
        if mark == end:
            self._buffer = self._buffer.removeprefix(end)
            self._end_thought()
            self._step = self._after if self._reading.is_bound else self._content
        else:
            self._ends_thought = True
            self._step = self._section if self._form.sections else self._call
        return True

    def _after(self, parts: list[Part]) -> bool:
        """Take the text between a thought and the content that a grammar binds."""
        assert self._reading.thought is not None
        after = self._reading.thought.after
        if len(self._buffer) < len(after) and after.startswith(self._buffer):
            return False
        self._buffer = self._buffer.removeprefix(after)
        self._trims = False
        self._step = self._plain
        return True

    def _end_thought(self) -> None:
        # Line breaks at the thought's end are layout.
        self._blanks = []
        self._trims = True
        self._ends_thought = False
        assert self._reading.thought is not None
        self._message_may_begin = self._thought_may_begin = self._reading.thought.is_message

    def _add_reasoning(self, text: str, parts: list[Part]) -> None:
        """Add to the thought, but hold back the line breaks at its end."""
        if self._trims:
            text = text.lstrip("\n")
        if not text:
            return
        self._trims = False
        solid = text.rstrip("\n")
        if solid and self._reading.shows_thought:
            parts.append(Reasoning("".join([*self._blanks, solid])))
        if solid:
            self._blanks = []
        if len(solid) < len(text):
            self._blanks.append(text[len(solid) :])

    def _content(self, parts: list[Part]) -> bool:
        """Take content up to the next thought, call or section."""
        if self._message_may_begin:
            assert self._reading.thought is not None
            begin = self._reading.thought.after
            if self._buffer.startswith(begin):
                self._buffer = self._buffer.removeprefix(begin)
                self._message_may_begin = self._thought_may_begin = False
                return True
            if begin.startswith(self._buffer):
                return False
        is_alone = self._reading.is_either or self._reading.is_bound
        if is_alone and not self._call_count:
            text = self._buffer.lstrip()
            if not any(each.startswith(text) or text.startswith(each) for each in self._openers()):
                self._step = self._plain
                return True
        openers = self._openers()
        found = [(at, text) for text in openers if (at := self._buffer.find(text)) >= 0]
        if not found:
            certain = _held_from(self._buffer, openers)
            self._add_content(self._buffer[:certain], parts)
            self._buffer = self._buffer[certain:]
            return False
        at, opener = min(found)
        self._add_content(self._buffer[:at], parts)
        self._buffer = self._buffer[at:]
        thought = self._reading.thought
        if thought is not None and opener == thought.begin:
            self._thought_may_begin = False
            self._buffer = self._buffer.removeprefix(opener)
            self._blanks = []
            self._trims = True
            self._step = self._thought
        else:
            self._step = self._section if self._form.sections else self._call
        return True

    def _plain(self, parts: list[Part]) -> bool:
        """Take all text as content, its blanks included, without searching it."""
        text = "".join([*self._blanks, self._buffer])
        self._blanks, self._buffer = [], ""
        if self._trims:
            text = text.lstrip("\n")
        if text:
            self._trims = False
            parts.append(Content(text))
        return False

    def _openers(self) -> list[str]:
        """Return the strings that end content. No thought begins after content."""
        thought, form = self._reading.thought, self._reading.form
        openers = [] if form is None else [form.trigger]
        if thought is not None and self._thought_may_begin:
            text = self._buffer.lstrip()
            if text.startswith(thought.begin) or thought.begin.startswith(text):
                openers.append(thought.begin)
        return openers

    def _add_content(self, text: str, parts: list[Part]) -> None:
        """Add content, but hold back the blanks at its end: before a call they are layout."""
        if self._trims:
            text = text.lstrip("\n")
        if not text:
            return
        self._trims = False
        solid = text.rstrip()
        if solid:
            self._thought_may_begin = self._message_may_begin = False
        if self._reading.form is None and not self._thought_may_begin:
            solid = text
        if solid:
            parts.append(Content("".join([*self._blanks, solid])))
            self._blanks = []
        if len(solid) < len(text):
            self._blanks.append(text[len(solid) :])

    @property
    def _form(self) -> ToolFormat:
        assert self._reading.form is not None
        return self._reading.form

    def _section(self, parts: list[Part]) -> bool:
        """Take the text that begins a section."""
        for begin, end in self._form.sections:
            if self._buffer.startswith(begin):
                self._buffer = self._buffer.removeprefix(begin)
                self._section_end = end
                self._step = self._call
                return True
        if any(begin.startswith(self._buffer) for begin, _ in self._form.sections):
            return False
        return self._no_call(parts)

    def _call(self, parts: list[Part]) -> bool:
        """Take the text that begins a call, or the text that ends the section."""
        if self._section_end:
            self._buffer = self._buffer.removeprefix(self._form.separator).lstrip()
            if self._buffer.startswith(self._section_end.lstrip()):
                self._buffer = self._buffer.removeprefix(self._section_end.lstrip())
                self._end_calls()
                return True
        for pattern, marks in self._begins:
            begin = pattern.match(self._buffer)
            if begin is None:
                continue
            if self._may_be_other and begin["name"] not in self._reading.schemas:
                # This text only begins like a call, and goes on with a name that no tool has.
                return self._no_call(parts)
            self._begin_call(begin, marks, parts)
            return True
        # Unless `_may_be_other`, the grammar allows only a call after the trigger.
        is_other = self._may_be_other and not self._may_begin()
        if is_other or len(self._buffer) > _LONGEST_BEGIN:
            return self._no_call(parts)
        return False

    @property
    def _may_be_other(self) -> bool:
        """True if a text that begins like a call need not be a call."""
        form = self._form
        return self._reading.is_either or self._ends_thought or form.begins_as_text

    def _may_begin(self) -> bool:
        """Return whether the text may become the beginning of a call of a known tool."""
        if not self._buffer or self._section_end:
            return True
        for marks in self._form.calls:
            for name in self._reading.schemas:
                begin = self._form.begin(marks, name)
                if begin.startswith(self._buffer[: len(begin)]):
                    return True
        return False

    def _begin_call(self, begin: re.Match[str], marks: CallMarks, parts: list[Part]) -> None:
        name = begin["name"]
        index = self._call_count
        self._call_count += 1
        self._blanks = []
        self._ends_thought = False
        self._buffer = self._buffer[begin.end() :]
        self._marks = marks
        schema = self._reading.schemas.get(name, {})
        held = self._reading.is_forced or name in self._reading.held
        self._arguments = argument_reader(self._form.style, marks.end, schema, held=held)
        self._step = self._read_arguments
        number = self._reading.first_call + index
        parts.append(CallBegin(index, _call_id(self._form, name, number), name))

    def _no_call(self, parts: list[Part]) -> bool:
        """Take a text that looked like the beginning of a call as content, or as a thought."""
        trigger = self._form.trigger
        text, self._buffer = self._buffer[: len(trigger)], self._buffer[len(trigger) :]
        self._section_end = ""
        if self._ends_thought:
            self._ends_thought = False
            self._add_reasoning(text, parts)
            self._step = self._thought
            return True
        self._add_content(text, parts)
        self._step = self._plain if self._reading.is_either else self._content
        return True

    def _end_calls(self) -> None:
        self._section_end = ""
        self._trims = True
        self._step = self._content

    def _read_arguments(self, parts: list[Part]) -> bool:
        assert self._arguments is not None
        piece, self._buffer = self._arguments.read(self._buffer)
        if piece:
            parts.append(CallArguments(self._call_count - 1, piece))
        if not self._arguments.is_complete:
            return False
        self._step = self._call_end
        # A call may have no text after its arguments.
        self._call_end(parts)
        return True

    def _call_end(self, parts: list[Part]) -> bool:
        """Take the text after a call's arguments."""
        assert self._marks is not None
        end = self._marks.end.lstrip()
        # Blanks after the arguments belong to the end mark; without a mark they belong to the
        # content.
        if end:
            self._buffer = self._buffer.lstrip()
            if not self._buffer.startswith(end):
                return False
            self._buffer = self._buffer.removeprefix(end)
        if self._section_end:
            self._step = self._call
        else:
            self._end_calls()
        return True


def _pattern(marks: CallMarks) -> re.Pattern[str]:
    """Return a pattern of the text that begins a call, with the group `name`."""
    before, _, after = marks.begin.partition("{name}")
    # A name that nothing follows is complete once another character has come.
    boundary = r"(?=[^\w.-])" if not after else ""
    numbered = r"\d+".join(re.escape(text) for text in after.split("{number}"))
    return re.compile(rf"{re.escape(before)}(?P<name>[\w.-]+){boundary}{numbered}", re.ASCII)


def _held_from(text: str, marks: Sequence[str]) -> int:
    """Return from where on the text may be the beginning of a mark; its length if nowhere."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for at in range(max(0, len(text) - longest), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at
    return len(text)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return the parts, with neighbours of one kind joined."""
    made: list[Part] = []
    for _, neighbours in groupby(parts, lambda part: (type(part), getattr(part, "index", None))):
        group = list(neighbours)
        first = group[0]
        if len(group) > 1 and not isinstance(first, CallBegin):
            text = "".join([part.text for part in group if not isinstance(part, CallBegin)])
            first = replace(first, text=text)
        made.append(first)
    return made


def _call_id(form: ToolFormat, name: str, index: int) -> str:
    if form.call_id == "function":
        return f"functions.{name}:{index}"
    length, start = (9, "") if form.call_id == "nine" else (24, "call_")
    return start + "".join(secrets.choice(_LETTERS) for _ in range(length))
