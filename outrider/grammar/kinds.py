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
class Grammar:
    """A constraint on the output. JSON_OBJECT has no `text`, and CHOICE has `choices` instead."""

    kind: GrammarKind
    text: str = ""
    choices: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """The parameter that errors about it name."""
        return f"grammar.{self.kind.value}"
