"""What an agent agrees to start: Outrider's own modules and redis-server, with settings that run no other code.

Knows no network. Every limit is checked by a raised OutriderError that names the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from bench.experiment.hosts import FILES, Launch, check_cores
from outrider.errors import invalid

MODULES = ("verifier_svc", "drafter_svc", "gateway", "bench.experiment.link_process")
PROGRAMS = ("redis-server",)
ENVIRONMENT = (
    "HF_HUB_OFFLINE",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OTEL_BSP_MAX_QUEUE_SIZE",
    "OTEL_BSP_SCHEDULE_DELAY",
)
MAX_ARGUMENTS = 128
MAX_ARGUMENT_BYTES = 4096
MAX_ENVIRONMENT = 16
MAX_FILES = 8
MAX_FILE_BYTES = 65_536

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_FAMILY = re.compile(r"[a-z0-9-]+")
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f]*")
# These read a file of settings, or run code that comes with a checkpoint.
_REFUSED_FLAGS = ("--config", "--trust-remote-code")
# Others load modules, write files anywhere or read further settings.
_REDIS_OPTIONS = (
    "--port",
    "--bind",
    "--save",
    "--appendonly",
    "--maxmemory",
    "--maxmemory-policy",
    "--protected-mode",
    "--requirepass",
)


def check_launch(launch: Launch) -> None:
    """Raises OutriderError(INVALID_VALUE) for a launch that an agent does not start."""
    if not _NAME.fullmatch(launch.name):
        raise invalid(
            "name",
            f"must be 1 to 64 letters, digits, dots, underscores and hyphens, not {launch.name[:100]!r}",
        )
    if launch.is_container:
        raise invalid(
            "container", f"an agent starts processes, not containers; {launch.name} cannot be one"
        )
    if launch.module:
        _check_module(launch)
    elif launch.program not in PROGRAMS:
        raise invalid("program", f"must be {' or '.join(PROGRAMS)}, not {launch.program[:100]!r}")
    else:
        _check_redis(launch.arguments)
    _check_arguments(launch.arguments)
    _check_environment(launch)
    _check_files(launch)
    check_cores("cores", launch.cores)


def _check_module(launch: Launch) -> None:
    if launch.program:
        raise invalid("program", "must be empty with a module")
    if launch.module not in MODULES:
        raise invalid("module", f"must be one of {', '.join(MODULES)}, not {launch.module[:100]!r}")
    for flag, value in _flags(launch.arguments):
        if flag in _REFUSED_FLAGS:
            raise invalid(
                "arguments",
                f"{flag} is refused: an agent runs no code and reads no settings but its own",
            )
        if flag == "--family" and not _FAMILY.fullmatch(value):
            raise invalid(
                "arguments",
                f"--family must be a name of lower-case letters, digits and hyphens, not {value[:100]!r}",
            )


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with its value, which follows behind `=` or as the next argument."""
    for argument, following in pairwise([*arguments, ""]):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            yield flag, value if equals else following


def _check_redis(arguments: Sequence[str]) -> None:
    if arguments and not arguments[0].startswith("--"):
        raise invalid(
            "arguments",
            f"redis-server takes no file of settings here, but {arguments[0][:100]!r} is one",
        )
    for argument in arguments:
        if argument.startswith("-") and argument not in _REDIS_OPTIONS:
            raise invalid(
                "arguments",
                f"redis-server may be given {', '.join(_REDIS_OPTIONS)}, not {argument[:100]!r}",
            )


def _check_arguments(arguments: Sequence[str]) -> None:
    if len(arguments) > MAX_ARGUMENTS:
        raise invalid("arguments", f"must be at most {MAX_ARGUMENTS}, not {len(arguments)}")
    for argument in arguments:
        if len(argument.encode()) > MAX_ARGUMENT_BYTES:
            raise invalid(
                "arguments",
                f"must each have at most {MAX_ARGUMENT_BYTES} bytes: {argument[:60]!r}... has more",
            )
        if not _PRINTABLE.fullmatch(argument):
            raise invalid("arguments", f"must have no control characters, as {argument[:60]!r} has")


def _check_environment(launch: Launch) -> None:
    if len(launch.environment) > MAX_ENVIRONMENT:
        raise invalid(
            "environment",
            f"must have at most {MAX_ENVIRONMENT} variables, not {len(launch.environment)}",
        )
    for name, value in launch.environment.items():
        if name not in ENVIRONMENT:
            raise invalid("environment", f"may set {', '.join(ENVIRONMENT)}, not {name[:100]!r}")
        if len(value) > MAX_ARGUMENT_BYTES or not _PRINTABLE.fullmatch(value):
            raise invalid(
                "environment",
                f"{name} must have at most {MAX_ARGUMENT_BYTES} bytes and no control characters",
            )


def _check_files(launch: Launch) -> None:
    if len(launch.files) > MAX_FILES:
        raise invalid("files", f"must be at most {MAX_FILES}, not {len(launch.files)}")
    for name, text in launch.files.items():
        if not _FILE_NAME.fullmatch(name):
            raise invalid(
                "files", f"must have plain names of at most 64 characters, not {name[:100]!r}"
            )
        if len(text.encode()) > MAX_FILE_BYTES:
            raise invalid(
                "files", f"must each have at most {MAX_FILE_BYTES} bytes, which {name} exceeds"
            )
    if not launch.files and any(FILES in argument for argument in launch.arguments):
        raise invalid("arguments", f"name {FILES}, but there are no files")
