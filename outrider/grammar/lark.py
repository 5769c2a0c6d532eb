"""Writes grammars in LLGuidance's Lark: rules, marks with special tokens, texts up to a mark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outrider.grammar.kinds import FreeThought

# The most blanks in an indentation of JSON or between tags. Without a bound a model can indent for
# ever.
_MAX_WHITESPACE = 16
_OPTIONS: Any = {
    # A space, or one line break with an indentation: a model must not write breaks for ever.
    "whitespace_pattern": rf"\x20|\x0D?\x0A[\x20\x09]{{0,{_MAX_WHITESPACE}}}",
    # The escape \u is left out: {"\u0061": 1} would pass as a property other than "a".
    "json_allowed_escapes": 'nrbtf\\"',
}
_PLAIN = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
}
TEXT = "TEXT"
"""The terminal of any text."""
BLANKS = "BLANKS?"
"""Some blanks or none."""
EMPTY = '""'
"""The empty text."""
_COMMON = rf"""TEXT: /(?s:.*)/
BLANKS: /[ \t\r\n]{{1,{_MAX_WHITESPACE}}}/"""


def literal(text: str) -> str:
    """Return the text as a string of Lark, escaped as in JSON."""
    # LLGuidance's lexer takes no raw DEL, which JSON does not escape.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def any_of(options: Iterable[str]) -> str:
    """Return an expression that matches one of the options."""
    return f"({' | '.join(option.strip() or EMPTY for option in options)})"


def json_rule(schema: Mapping[str, Any], *, is_plain: bool = False) -> str:
    """Return the right side of a rule that matches a translated JSON schema.

    With `is_plain`, the JSON has the blanks that Python's `json` writes, and no others.
    """
    options = _OPTIONS | (_PLAIN if is_plain else {})
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def regex_rule(pattern: str) -> str:
    """Return the right side of a rule that matches a translated regular expression."""
    return f"/{pattern}/" if pattern else EMPTY


class SpecialTokens:
    """A tokenizer's special tokens.

    A grammar matches special tokens by id, since their bytes match no text.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids` maps a token's name to its id."""
        self._ids = ids
        names = sorted(ids, key=len, reverse=True)
        self._names = re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")

    def split(self, text: str) -> list[str]:
        """Split at the names of special tokens; return text, name, text and so on.

        Texts may be empty.
        """
        return self._names.split(text)

    def __getitem__(self, name: str) -> int:
        return self._ids[name]


class LarkRules:
    """Collects rules. Equal rules are written once."""

    def __init__(self, specials: SpecialTokens) -> None:
        self._specials = specials
        self._names: dict[str, str] = {}
        self._rules: dict[str, str] = {}

    def text(self, start: str) -> str:
        """Return the whole grammar, whose first rule is `start`."""
        rules = [f"{name}{definition}" for name, definition in self._rules.items()]
        return "\n".join([f"start: {start or EMPTY}", _COMMON, *rules])

    def rule(self, body: str) -> str:
        """Add a rule; return its name."""
        return self._named(f": {body}", "r")

    def terminal(self, body: str) -> str:
        """Add a terminal: a regular part whose longest match counts. Return its name."""
        return self._named(f": {body}", "T")

    def recursive(self, key: str, body: Callable[[], str]) -> str:
        """Add a rule whose body may contain its name; return the name.

        `key` is unique to the rule.
        """
        if key not in self._names:
            self._names[key] = f"r{len(self._names)}"
            self._rules[self._names[key]] = f": {body()}"
        return self._names[key]

    def _named(self, definition: str, prefix: str) -> str:
        name = self._names.setdefault(definition, f"{prefix}{len(self._names)}")
        self._rules.setdefault(name, definition)
        return name

    def json(self, schema: Mapping[str, Any], *, is_plain: bool = False) -> str:
        """Add a rule for a translated JSON schema without outer references; return its name."""
        return self.rule(json_rule(schema, is_plain=is_plain))

    def mark(self, text: str) -> str:
        """Return an expression that matches only this text.

        Where the text has a special token's name, the output may have that token, or spell the name
        with other tokens.
        """
        first, *more = self._specials.split(text)
        parts = [literal(first)] if first else []
        for name, rest in zip(more[::2], more[1::2], strict=True):
            parts.append(f"(<[{self._specials[name]}]> | {literal(name)})")
            parts += [literal(rest)] if rest else []
        return " ".join(parts)

    def until(self, terminal: str, mark: str) -> str:
        """Return an expression for the terminal's text and the first `mark` after it.

        If `mark` is empty, return the terminal alone.
        """
        if not mark:
            return terminal
        spelled = self._named(f"[lazy]: {terminal} {literal(mark)}", "r")
        before, *more = self._specials.split(mark)
        if not more:
            return spelled
        head = self.terminal(f"{terminal} {literal(before)}") if before else terminal
        rest = self.mark("".join(more[1:]))
        return f"({head} <[{self._specials[more[0]]}]> {rest} | {spelled})"


def behind_thought(answer: str, thought: FreeThought, specials: SpecialTokens) -> str:
    """Return the grammar of a thought that is followed by a text of the grammar `answer`."""
    rules = LarkRules(specials)
    # The answer's grammar is nested in this grammar, so its names and terminals are separate.
    bound = rules.rule(f"%lark {{\n{answer}\n}}")
    ended = f"{rules.until(TEXT, thought.end)} {rules.mark(thought.after)} {bound}"
    if not thought.begin:
        return rules.text(ended)
    return rules.text(any_of([f"{rules.mark(thought.begin)} {ended}", bound]))
