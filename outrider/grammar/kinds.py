"""The grammars that a request may have, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GrammarKind(Enum):
    """The language of a grammar's text; the values are the names of the proto's fields."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class FreeThought:
    """A thought before the answer, and the text after the thought. The grammar applies to neither.

    The thought goes from `begin` to the first `end`, and `after` follows it. The output may leave
    out a thought that has a `begin`. An empty `begin` stands for a thought that the prompt begins.
    """

    begin: str
    end: str
    after: str = ""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output. JSON_OBJECT has no `text`, and CHOICE has `choices` instead.

    With a `thought` it applies only to the text after the thought.
    """

    kind: GrammarKind
    text: str = ""
    choices: tuple[str, ...] = ()
    thought: FreeThought | None = None

    @property
    def field(self) -> str:
        """The name of the parameter, for errors about the grammar."""
        return f"grammar.{self.kind.value}"
