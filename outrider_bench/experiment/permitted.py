"""Limits what an agent starts: Outrider's modules and redis-server, and no code of others.

Knows no network. Every check raises OutriderError(INVALID_VALUE) that names the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from outrider.errors import invalid
from outrider_bench.experiment.hosts import FILES, Launch, check_cores

MODULES = ("verifier_svc", "drafter_svc", "gateway", "outrider_bench.experiment.link_process")
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
# These flags read a file of settings, or run code that comes with a checkpoint.
_REFUSED_FLAGS = ("--config", "--trust-remote-code")
# Other options load modules, write files anywhere or read further settings.
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
    """Raise OutriderError(INVALID_VALUE) for a launch that an agent does not start."""
    if not _NAME.fullmatch(launch.name):
        allowed = "1 to 64 letters, digits, dots, underscores and hyphens"
        raise invalid("name", f"must be {allowed}, not {launch.name[:100]!r}")
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
            reason = "an agent runs no code and reads no settings but its own"
            raise invalid("arguments", f"{flag} is refused: {reason}")
        if flag == "--family" and not _FAMILY.fullmatch(value):
            allowed = "a name of lower-case letters, digits and hyphens"
            raise invalid("arguments", f"--family must be {allowed}, not {value[:100]!r}")


def _flags(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with its value, which follows `=` or is the next argument."""
    for argument, following in pairwise([*arguments, ""]):
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            yield flag, value if equals else following


def _check_redis(arguments: Sequence[str]) -> None:
    if arguments and not arguments[0].startswith("--"):
        file = repr(arguments[0][:100])
        raise invalid("arguments", f"redis-server takes no file of settings here, such as {file}")
    for argument in arguments:
        if argument.startswith("-") and argument not in _REDIS_OPTIONS:
            known = ", ".join(_REDIS_OPTIONS)
            raise invalid("arguments", f"redis-server takes {known} here, not {argument[:100]!r}")


def _check_arguments(arguments: Sequence[str]) -> None:
    if len(arguments) > MAX_ARGUMENTS:
        raise invalid("arguments", f"must be at most {MAX_ARGUMENTS}, not {len(arguments)}")
    for argument in arguments:
        if len(argument.encode()) > MAX_ARGUMENT_BYTES:
            limit = f"at most {MAX_ARGUMENT_BYTES} bytes"
            raise invalid("arguments", f"must each have {limit}: {argument[:60]!r}... has more")
        if not _PRINTABLE.fullmatch(argument):
            raise invalid("arguments", f"must have no control characters, as {argument[:60]!r} has")


def _check_environment(launch: Launch) -> None:
    count = len(launch.environment)
    if count > MAX_ENVIRONMENT:
        raise invalid("environment", f"must have at most {MAX_ENVIRONMENT} variables, not {count}")
    for name, value in launch.environment.items():
        if name not in ENVIRONMENT:
            raise invalid("environment", f"may set {', '.join(ENVIRONMENT)}, not {name[:100]!r}")
        if len(value) > MAX_ARGUMENT_BYTES or not _PRINTABLE.fullmatch(value):
            limits = f"at most {MAX_ARGUMENT_BYTES} bytes and no control characters"
            raise invalid("environment", f"{name} must have {limits}")


def _check_files(launch: Launch) -> None:
    if len(launch.files) > MAX_FILES:
        raise invalid("files", f"must be at most {MAX_FILES}, not {len(launch.files)}")
    for name, text in launch.files.items():
        if not _FILE_NAME.fullmatch(name):
            limit = "plain names of at most 64 characters"
            raise invalid("files", f"must have {limit}, not {name[:100]!r}")
        if len(text.encode()) > MAX_FILE_BYTES:
            limit = f"at most {MAX_FILE_BYTES} bytes"
            raise invalid("files", f"must each have {limit}, which {name} exceeds")
    if not launch.files and any(FILES in argument for argument in launch.arguments):
        raise invalid("arguments", f"name {FILES}, but there are no files")
