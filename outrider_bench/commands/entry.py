"""The shared parts of the entry points of `outrider lab`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import click

from outrider.errors import OutriderError
from outrider.process.settings.usage import invoke, refuse

INTERRUPTED = 130
"""The status of a command that Ctrl-C ended, as in a shell."""


@contextmanager
def refusing(program: str) -> Iterator[None]:
    """Print the message of a ValueError or an OutriderError, and exit with status 2."""
    try:
        yield
    except (ValueError, OutriderError) as error:
        refuse(program, str(error))


def entry(name: str) -> Callable[[Callable[..., int]], Callable[[list[str]], int]]:
    """Make `outrider lab NAME` from a function that takes click's arguments and returns a status.

    The command is a function of the list of arguments. With wrong arguments it exits with status
    2, as in `refusing`.
    """
    program = f"outrider lab {name}"

    def made(function: Callable[..., int]) -> Callable[[list[str]], int]:
        @wraps(function)
        def run(**values: Any) -> int:
            with refusing(program):
                return function(**values)

        command = click.command()(run)
        return lambda arguments: int(invoke(command, program, arguments))

    return made
