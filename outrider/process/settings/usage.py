"""Runs click commands, and prints one line per wrong argument in place of click's usage text.

Help shows every default, and lists the flags of a command with many settings by group. This module
imports nothing but click and the standard library.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import click

_HELP_WIDTH = 110
_OTHERS = "Options"


def invoke(command: click.Command, program: str, arguments: Sequence[str]) -> Any:
    """Return the command's result, or the exit status if click ended the command, as for --help.

    Prints the reason and exits with status 2 if the arguments are wrong.
    """
    try:
        return command.main(
            arguments,
            prog_name=program,
            standalone_mode=False,
            show_default=True,
            max_content_width=_HELP_WIDTH,
        )
    except click.NoSuchOption as error:
        context = error.ctx or click.Context(command, info_name=program)
        flags = [flag for parameter in context.command.params for flag in parameter.opts]
        path = context.command_path
        unknown = f"{error.option_name}{suggestion(error.option_name, flags)}"
        refuse(path, f"there is no setting {unknown}; {path} --help lists them")
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else program
        refuse(path, error.format_message())


class GroupedCommand(click.Command):
    """A command whose help shows its flags in groups."""

    def __init__(self, name: str, *, titles: Mapping[str, str], **rest: Any) -> None:
        """`titles` maps a parameter's name to the title of its group."""
        super().__init__(name, **rest)
        self._titles = titles

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups in the order of their first flags."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                title = self._titles.get(parameter.name or "") or _OTHERS
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" with the most similar known name; "" if there is none."""
    alike = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f" (did you mean {alike[0]}?)" if alike else ""


def refuse(program: str, *problems: str) -> NoReturn:
    """Print each problem and exit with status 2."""
    for problem in problems:
        print(f"{program}: {problem}", file=sys.stderr)
    raise SystemExit(2)
