"""Renders chat templates, in a worker process: see `gateway.text.templates`.

A template is a program of the model's author. It runs in jinja2's sandbox, which keeps it from
reaching code outside, but does not stop endless loops.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

HANDLER = f"{__name__}:renderer"


def renderer(sources: dict[str, str]) -> Callable[[bytes], bytes]:
    """Return a handler that renders templates.

    The handler takes [name of the template, variables] in JSON. The handler answers with JSON:
    {"text": …}, or {"error": …} with the template's message. If the variables are null, it only
    compiles the template.
    """
    compiled: dict[str, jinja2.Template] = {}

    def handle(request: bytes) -> bytes:
        name, variables = json.loads(request)
        try:
            # Compile the template within a call, whose limits then hold: jinja2 evaluates constants
            # when it compiles.
            if name not in compiled:
                compiled[name] = _environment().from_string(sources[name])
            text = "" if variables is None else compiled[name].render(variables)
        except MemoryError:
            raise
        # A template is a program and may raise anything.
        except Exception as error:  # noqa: BLE001
            return json.dumps({"error": str(error)}).encode()
        return json.dumps({"text": text}).encode()

    return handle


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the value as plain JSON. jinja2's own filter escapes JSON for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
