"""Translates structural tags, XGrammar's language, to LLGuidance's Lark.

A structural tag has free text with constrained parts. Elements that name single tokens, and
grammars within a tag, are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.errors import OutriderError, invalid
from outrider.grammar.arguments import TAGS, ArgumentRules
from outrider.grammar.branches import alone
from outrider.grammar.lark import TEXT, LarkRules, SpecialTokens, any_of, regex_rule
from outrider.grammar.regex import full_match
from outrider.grammar.repetition import check_pattern, check_times
from outrider.grammar.schema import translate_schema

_MAX_NESTING = 64
_REPEATS = {"optional": (0, 1), "star": (0, None), "plus": (1, None)}


def translate_tag(tag: Any, field: str, specials: SpecialTokens) -> str:
    """Translate a structural tag; raise OutriderError(INVALID_VALUE) for a refused part."""
    if not isinstance(tag, Mapping) or tag.get("type") != "structural_tag":
        raise invalid(field, 'must be an object of the type "structural_tag"')
    rules = LarkRules(specials)
    parts = tag.get("parts", {})
    return rules.text(_Tag(field, rules, parts).element(tag.get("format"), ""))


class _Tag:
    """Writes the rules of one structural tag."""

    def __init__(self, field: str, rules: LarkRules, parts: Any) -> None:
        self._field, self._rules, self._parts = field, rules, parts
        self._arguments = ArgumentRules(field, rules)
        self._depth, self._times = 0, 1
        self._kinds: dict[str, Callable[[Mapping[str, Any], str], str]] = {
            "const_string": lambda part, after: rules.mark(self._text(part, "value") + after),
            "any_text": lambda _, after: rules.until(TEXT, after),
            "regex": self._regex,
            "json_schema": self._schema,
            "json_schemas": self._schemas,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "text_and_tag": self._text_and_tag,
            "tags_with_separator": self._separated,
            "repeat": self._repeat,
            "part": self._part,
            **dict.fromkeys(_REPEATS, self._repeat),
        }

    def element(self, part: Any, after: str) -> str:
        """Return an expression for an element and the text `after` it."""
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in self._kinds:
            raise self._refused(f"has an element of the type {str(kind)[:40]!r}")
        if self._depth >= _MAX_NESTING:
            raise self._refused(f"is nested more than {_MAX_NESTING} deep")
        self._depth += 1
        found = self._kinds[kind](part, after)
        self._depth -= 1
        return found

    def _refused(self, problem: str) -> OutriderError:
        return invalid(self._field, f"{problem}, which cannot be enforced")

    def _text(self, part: Mapping[str, Any], name: str) -> str:
        value = part.get(name)
        if not isinstance(value, str):
            raise invalid(self._field, f"must have a text as {name} of its {part['type']}")
        return value

    def _list(self, part: Mapping[str, Any], name: str) -> Sequence[Any]:
        value = part.get(name)
        if not isinstance(value, list) or not value:
            raise invalid(self._field, f"must have a list as {name} of its {part['type']}")
        return value

    def _regex(self, part: Mapping[str, Any], after: str) -> str:
        pattern = self._text(part, "pattern")
        check_pattern(pattern, self._field)
        translated = regex_rule(full_match(pattern, self._field))
        return self._rules.until(self._rules.terminal(translated), after)

    def _schema(self, part: Mapping[str, Any], after: str) -> str:
        schema = translate_schema(part.get("json_schema"), self._field)
        style = part.get("style", "json")
        if style == "json":
            found = self._rules.json(schema)
        elif style == "gemma" or style in TAGS:
            found = self._arguments.expression(schema, style)
        else:
            raise self._refused(f"has the style {str(style)[:40]!r}")
        return f"{found} {self._rules.mark(after)}"

    def _schemas(self, part: Mapping[str, Any], after: str) -> str:
        """Return an expression for JSON that satisfies one of several schemas, in Python's layout.

        XGrammar has no such element. If schemas whose texts begin alike had separate rules, the
        rules would exclude each other.
        """
        options: list[Any] = []
        definitions: dict[str, Any] = {}
        for i, each in enumerate(self._list(part, "schemas")):
            schema = translate_schema(each, self._field)
            options.append(alone(schema, schema, f"{i}_"))
            definitions |= options[-1].pop("$defs", {})
        whole = {"anyOf": options, "$defs": definitions}
        return f"{self._rules.json(whole, is_plain=True)} {self._rules.mark(after)}"

    def _sequence(self, part: Mapping[str, Any], after: str) -> str:
        parts: list[str] = []
        for inner in reversed(self._list(part, "elements")):
            if isinstance(inner, Mapping) and inner.get("type") == "const_string":
                after = self._text(inner, "value") + after
                continue
            if parts and not after and _is_open(inner):
                raise self._refused("has free text before an element that is no text")
            parts.append(self.element(inner, after))
            after = ""
        parts.append(self._rules.mark(after))
        return f"({' '.join(reversed(parts))})"

    def _or(self, part: Mapping[str, Any], after: str) -> str:
        return any_of([self.element(inner, after) for inner in self._list(part, "elements")])

    def _tag(self, part: Mapping[str, Any], after: str) -> str:
        return self._behind(part, 0, after)

    def _behind(self, tag: Any, length: int, after: str) -> str:
        """Return an expression for the rest of a tag after its first `length` characters."""
        if not isinstance(tag, Mapping):
            raise invalid(self._field, "must have objects as tags")
        tag = {"type": "tag", **tag}
        begin, end = self._text(tag, "begin")[length:], self._text(tag, "end")
        return f"{self._rules.mark(begin)} {self.element(tag.get('content'), end + after)}"

    def _part(self, part: Mapping[str, Any], after: str) -> str:
        """Return an expression for one of the tag's `parts`; XGrammar has no such element."""
        name = self._text(part, "name")
        if not isinstance(self._parts, Mapping) or name not in self._parts:
            raise invalid(self._field, f"has no part {name[:40]!r}")
        found = self._rules.recursive(f"part {name}", lambda: self.element(self._parts[name], ""))
        return f"{found} {self._rules.mark(after)}"

    def _triggered(self, part: Mapping[str, Any], after: str) -> str:
        if part.get("excludes"):
            raise self._refused("has excludes")
        tags = self._list(part, "tags")
        options = []
        for trigger in self._list(part, "triggers"):
            begun = [tag for tag in tags if _begins(tag, trigger)]
            if not begun:
                raise invalid(self._field, "has a trigger with which none of its tags begins")
            inner = any_of(self._rules.rule(self._behind(tag, len(trigger), "")) for tag in begun)
            options.append(f"{self._rules.until(TEXT, trigger)} {inner}")
        once = self._rules.rule(any_of(options))
        rest = self._rules.until(TEXT, after)
        stops = part.get("stop_after_first")
        if not part.get("at_least_one"):
            end = self._rules.mark(after)
            return any_of([f"{once} {end}", rest]) if stops else f"{once}* {rest}"
        # Text may come after the first tag, but not before it.
        first = self._rules.rule(any_of(self._behind(tag, 0, "") for tag in tags))
        return f"{first} {self._rules.mark(after) if stops else f'{once}* {rest}'}"

    def _text_and_tag(self, part: Mapping[str, Any], after: str) -> str:
        """Return an expression for free text and one tag after it; XGrammar has no such element."""
        options = []
        for tag in self._list(part, "tags"):
            begin = self._text({"type": "tag", **tag}, "begin")
            rest = self._rules.rule(self._behind(tag, len(begin), after))
            options.append(f"{self._rules.until(TEXT, begin)} {rest}")
        return any_of(options)

    def _separated(self, part: Mapping[str, Any], after: str) -> str:
        tags = [self._rules.rule(self._behind(tag, 0, "")) for tag in self._list(part, "tags")]
        once = self._rules.rule(any_of(tags))
        separator = self._rules.mark(self._text(part, "separator"))
        found = once if part.get("stop_after_first") else f"{once} ({separator} {once})*"
        if not part.get("at_least_one"):
            found = f"({found})?"
        return f"{found} {self._rules.mark(after)}"

    def _repeat(self, part: Mapping[str, Any], after: str) -> str:
        least, most = _REPEATS.get(part["type"], (part.get("min"), part.get("max")))
        if most in (None, -1):
            most = None
        for count in (least, 0 if most is None else most):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise invalid(self._field, "must have integers as min and max of its repeat")
        assert least is not None
        times = max(1, least, most or 1)
        self._times *= times
        check_times(self._times, self._field)
        inner = self._rules.rule(self.element(part.get("content"), ""))
        self._times //= times
        count = f"{least},{'' if most is None else most}"
        return f"{inner}{{{count}}} {self._rules.mark(after)}"


def _is_open(part: Any) -> bool:
    """Return whether an element is free text, which ends where the text after it begins."""
    return isinstance(part, Mapping) and part.get("type") in ("any_text", "triggered_tags")


def _begins(tag: Any, trigger: Any) -> bool:
    begin = tag.get("begin") if isinstance(tag, Mapping) else None
    if not isinstance(begin, str) or not isinstance(trigger, str):
        return False
    return trigger != "" and begin.startswith(trigger)
