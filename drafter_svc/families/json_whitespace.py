"""Learns and guesses the whitespace between the words of a JSON text.

A joint is a place between two words or marks of a JSON text. A grammar mostly allows whitespace at
each joint. A model mostly writes the same whitespace at joints of one kind. The family therefore
learns the whitespace from the text so far.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.grammar.kinds import FreeThought

WHITESPACE = b" \t\n\r"
# These bytes distinguish joints. All other bytes count as words.
_MARKS = b"{}[],:"
# The number of bytes that are kept of a text, to tell the indentation of the text's last line.
_KEPT_BYTES = 1024
# Each outcome at a joint moves the trust in the joint's whitespace towards 0 or 1, by the part
# `_STEP` of the way. After the first outcome the trust is `_FIRST_TRUST`.
_STEP = 0.5
_FIRST_TRUST = 0.9

_Joint = tuple[int, int]
# The whitespace at a joint: its bytes, or if there is a line break among them, the change of
# indentation.
_Shape = bytes | int


def _spaced(last: int, following: int) -> _Shape:
    return b" " if last in b",:" else b""


def _compact(last: int, following: int) -> _Shape:
    return b""


def _indented(unit: int, last: int, following: int) -> _Shape:
    if last in b"{[" and following in b"}]":
        return b""
    if last in b"{[":
        return unit
    if following in b"}]":
        return -unit
    return 0 if last == ord(",") else _spaced(last, following)


# The layouts of json.dumps, each with its probability, the likeliest first: the default, a layout
# without whitespace, and two with an indentation.
_STYLES = (
    (_spaced, 0.6),
    (_compact, 0.3),
    (lambda last, following: _indented(2, last, following), 0.07),
    (lambda last, following: _indented(4, last, following), 0.03),
)


@dataclass(frozen=True, slots=True)
class Place:
    """The end of a text: its last byte that is not whitespace, and the whitespace after that byte.

    `indent` is the indentation of that byte's line.
    """

    last: int
    whitespace: bytes
    indent: int

    @classmethod
    def after(cls, text: bytes) -> Place:
        """Return the place at the end of a text."""
        solid = text.rstrip(WHITESPACE)
        line = solid.rpartition(b"\n")[2]
        indent = len(line) - len(line.lstrip(b" \t"))
        return cls(solid[-1] if solid else 0, text[len(solid) :], indent)


class AfterThought:
    """Removes the thought before an answer, since whitespace in thoughts and answers differs."""

    def __init__(self, thought: FreeThought | None) -> None:
        """Without a `thought` all text is the answer."""
        self._marks: list[bytes] = []
        if thought is not None:
            self._marks = [thought.begin.encode(), thought.end.encode()]
        self._held = b""

    def read(self, new: bytes) -> bytes:
        """Return the part of the text `new` that belongs to the answer."""
        text = self._held + new
        self._held = b""
        if len(self._marks) == 2:
            begin = self._marks[0]
            if len(text) < len(begin) and begin.startswith(text):
                self._held = text
                return b""
            self._marks = self._marks[1:] if text.startswith(begin) else []
            text = text.removeprefix(begin)
        if not self._marks:
            return text
        end = self._marks[0]
        _, found, answer = text.partition(end)
        if found:
            self._marks = []
            return answer
        self._held = text[max(0, len(text) - len(end) + 1) :]
        return b""


class Layout:
    """Guesses the whitespace at a joint by looking at earlier joints of the same kind.

    At an unknown joint it guesses the whitespace of the `json.dumps` styles that fit the text so
    far.
    """

    def __init__(self) -> None:
        self.text = b""
        """The end of the text."""
        self._styles = list(_STYLES)
        self._known: dict[_Joint, tuple[_Shape, float]] = {}
        self._last = 0
        self._quoted = self._escaped = False

    def read(self, new: bytes) -> None:
        """Append to the text, and learn from its joints."""
        begin = len(self.text)
        text = self.text + new
        for at in range(begin, len(text)):
            byte = text[at]
            if self._quoted:
                self._read_quoted(byte)
            elif byte not in WHITESPACE:
                joint = _joint(self._last, byte)
                # An object or a list after a word begins a JSON text: no joint is before it.
                if joint != (0, 0) and (joint[0] or byte not in b"{["):
                    self._learn(Place.after(text[max(0, at - _KEPT_BYTES) : at]), byte)
                self._last = byte
                self._quoted = byte == ord('"')
        self.text = text[-_KEPT_BYTES:]

    def _read_quoted(self, byte: int) -> None:
        # JSON has no line break in a string. So if there is one, the last quotation mark belongs to
        # a text before the JSON.
        ended = byte == ord("\n") or (byte == ord('"') and not self._escaped)
        self._quoted = not ended
        self._escaped = byte == ord("\\") and not self._escaped

    def _learn(self, place: Place, byte: int) -> None:
        joint = _joint(place.last, byte)
        shape: _Shape = place.whitespace
        if b"\n" in place.whitespace:
            shape = len(place.whitespace.rpartition(b"\n")[2]) - place.indent
        known = self._known.get(joint)
        trust = _FIRST_TRUST
        if known is not None:
            trust = known[1] + _STEP * ((known[0] == shape) - known[1])
        self._known[joint] = shape, trust
        self._styles = [style for style in self._styles if style[0](*joint) == shape]

    def guesses(self, place: Place, byte: int) -> list[tuple[bytes, float]]:
        """Return whitespace strings that may yet come between `place` and `byte`, likeliest first.

        Each string has its probability. The list is empty if nothing is known about joints of this
        kind, or if the known whitespace does not begin with the whitespace at `place`.
        """
        joint = _joint(place.last, byte)
        known = self._known.get(joint)
        shapes: list[tuple[_Shape, float]] = [(style(*joint), part) for style, part in self._styles]
        if known is not None:
            shapes = [known]
        found: dict[bytes, float] = {}
        for shape, chance in shapes:
            whitespace = _whitespace(shape, place.indent)
            if whitespace.startswith(place.whitespace):
                rest = whitespace[len(place.whitespace) :]
                found[rest] = found.get(rest, 0.0) + chance
        if known is None:
            total = sum(found.values()) / _FIRST_TRUST
            found = {rest: chance / total for rest, chance in found.items()}
        return sorted(found.items(), key=lambda pair: -pair[1])


def _joint(last: int, following: int) -> _Joint:
    return last if last in _MARKS else 0, following if following in _MARKS else 0


def _whitespace(shape: _Shape, indent: int) -> bytes:
    if isinstance(shape, bytes):
        return shape
    return b"\n" + b" " * max(0, indent + shape)
