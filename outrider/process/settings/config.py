"""Reads a process's settings from flags, environment and YAML by one pydantic schema.

Unknown flags and keys are refused.
"""

from __future__ import annotations

import json
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin

import click
from click.shell_completion import CompletionItem
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)
from yaml import YAMLError

from outrider.errors import OutriderError, Reason
from outrider.process.files import MOST_BYTES
from outrider.process.settings.usage import GroupedCommand, invoke, refuse, suggestion

_Settings = TypeVar("_Settings", bound="Settings")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["auto", "int8", "dtype"]


DEVICE = r"auto|cpu|cuda(:\d+)?"
"""The pattern of a device's name."""


def _check_device(text: str) -> str:
    if re.fullmatch(DEVICE, text) is None:
        raise ValueError(f"must be auto, cpu, cuda or cuda:N, not {text!r}")
    return text


Device = Annotated[str, AfterValidator(_check_device)]


# click's name for the argument that may be given in place of a flag.
_ARGUMENT = "argument"
_METAVARS = {int: "INTEGER", float: "NUMBER", Path: "PATH"}


class Settings(BaseSettings):
    """Base of each command's settings.

    Precedence: flags, environment, the YAML file of `--config` (see `FileSettings`), defaults.
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        enable_decoding=False,
        # Compose and Helm send "" for settings that are not set.
        env_ignore_empty=True,
    )

    argument: ClassVar[str | None] = None
    """Name of the setting that may also be given without its flag."""

    groups: ClassVar[Mapping[str, str]] = {}
    """Titles of groups of flags in help, by the name of the group's first setting. A group goes on
    until the next group of the same class begins."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in their order of precedence."""
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls)

    @field_validator("*", mode="before")
    @classmethod
    def _read_list(cls, value: Any, info: ValidationInfo) -> Any:
        """Read a list setting that is text, or whose items are text.

        The text is a JSON list, one string, or numbers with commas between them.
        """
        annotation = cls.model_fields[info.field_name or ""].annotation
        if get_origin(annotation) is not list or not isinstance(value, str | list | tuple):
            return value
        texts = [value] if isinstance(value, str) else value
        is_text = get_args(annotation) == (str,)
        return [item for text in texts for item in _items(text, is_text=is_text)]


class FileSettings(Settings):
    """Base of settings that may also stand in a file."""

    groups: ClassVar[Mapping[str, str]] = {"config": "Process"}

    config: Path | None = None
    """YAML file with any of these settings, named with underscores."""


class ServiceSettings(FileSettings):
    """Base of the settings of a process that runs until it is stopped."""

    groups: ClassVar[Mapping[str, str]] = {"log_level": "Process"}

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged."""

    log_format: Literal["text", "json"] = "text"
    """Form of a record in the log on standard error: text, or one JSON object a line."""

    check_config: bool = False
    """Check the settings and the files that they name, print what would be used, and start
    nothing."""


class ScrapedSettings(ServiceSettings):
    """Base of the settings of a process whose only HTTP server serves its metrics."""

    groups: ClassVar[Mapping[str, str]] = {"listen": "Addresses"}

    listen: str = "127.0.0.1:0"
    """host:port to serve gRPC on (a drafter serves only its health); port 0 takes any free port."""

    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of Prometheus' /metrics, on the host of `listen`; 0 is off."""


def parse(schema: type[_Settings], program: str, arguments: list[str]) -> _Settings:
    """Read the settings of a process from its arguments.

    Prints one line per problem and exits with status 2 if there is any.
    """
    result = invoke(command(schema, program, lambda settings: settings), program, arguments)
    if not isinstance(result, schema):
        # The exit status of --help.
        raise SystemExit(result)
    return result


def command(schema: type[_Settings], name: str, run: Callable[[_Settings], Any]) -> click.Command:
    """Make a click command with the schema's settings as flags.

    The command reads the other settings from environment and file, and returns `run(settings)`.
    """

    def called(**values: Any) -> Any:
        """Load the settings and run; exit with status 2 and the reasons if a setting is wrong."""
        context = click.get_current_context()
        try:
            settings = load(schema, _given(schema, context, values))
        except ValueError as error:
            refuse(context.command_path, *str(error).splitlines())
        return run(settings)

    titles = _titles(schema)
    return GroupedCommand(
        name,
        titles=titles,
        params=_parameters(schema, titles),
        callback=called,
        help=schema.__doc__,
    )


def _titles(schema: type[Settings]) -> dict[str, str]:
    """Map each setting to its group's title ("" for none); the schema's own settings come first."""
    titles: dict[str, str] = {}
    for base in schema.__mro__:
        title = ""
        for name in base.__annotations__ if issubclass(base, BaseModel) else ():
            title = vars(base).get("groups", {}).get(name, title)
            if name in schema.model_fields:
                titles.setdefault(name, title)
    return titles


def _parameters(schema: type[Settings], names: Iterable[str]) -> list[click.Parameter]:
    """Return a flag for each of the settings in `names`."""
    parameters = [_option(name, schema.model_fields[name]) for name in names]
    if schema.argument is not None:
        metavar = f"[{schema.argument.upper()}]"
        argument = click.Argument([_ARGUMENT], required=False, metavar=metavar, type=_Text(()))
        parameters.append(argument)
    return parameters


def _given(
    schema: type[Settings], context: click.Context, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that the command line sets.

    Raises UsageError for a setting that is given twice.
    """
    commandline = click.core.ParameterSource.COMMANDLINE
    given = {
        field: value
        for field, value in values.items()
        if context.get_parameter_source(field) is commandline
    }
    if _ARGUMENT in given and schema.argument is not None:
        if schema.argument in given:
            raise click.UsageError(f"{schema.argument} is given twice")
        given[schema.argument] = given.pop(_ARGUMENT)
    return given


def load(schema: type[_Settings], given: Mapping[str, Any]) -> _Settings:
    """Complete the given settings from environment and file.

    Raises ValueError with one line per problem.
    """
    path = None
    if issubclass(schema, FileSettings):
        named = os.environ.get(f"{schema.model_config.get('env_prefix')}CONFIG")
        path = given.get("config", named and Path(named))
    if path and not Path(path).is_file():
        raise ValueError(f"config: {path} is not a file")
    if path and Path(path).stat().st_size > MOST_BYTES:
        raise ValueError(f"config: {path} has more than {MOST_BYTES} bytes")

    # This class is created here, since the file's path is known only now.
    class WithFile(schema):  # type: ignore[misc, valid-type]
        """The schema, reading the YAML file at `path`."""

        model_config = SettingsConfigDict(yaml_file=path)

    WithFile.__name__ = schema.__name__
    try:
        return cast(_Settings, WithFile(**given))
    except ValidationError as error:
        problems = [_problem(schema, details) for details in error.errors()]
        raise ValueError("\n".join(problems)) from error
    except YAMLError as error:
        raise ValueError(f"config: {path}: {' '.join(str(error).split())}") from error
    except (TypeError, ValueError) as error:
        hint = "must have one setting and its value a line, as in draft_tokens: auto"
        raise ValueError(f"config: {path} {hint}") from error
    except OSError as error:
        raise ValueError(f"config: {path} cannot be read: {error.strerror}") from error


class _Text(click.ParamType):  # type: ignore[type-arg]  # generic only from click 8.4 on
    """Any text, which the schema checks.

    A shell completes the text to one of `choices`, or to a file.
    """

    name = "text"

    def __init__(self, choices: tuple[str, ...]) -> None:
        self._choices = choices

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the completions of `incomplete`."""
        if not self._choices:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(choice) for choice in self._choices if choice.startswith(incomplete)]


def _option(field: str, info: FieldInfo) -> click.Parameter:
    flag = _flag(field)
    text = " ".join((info.description or "").split())
    if info.is_required():
        text += " [required]"
    else:
        default = info.get_default(call_default_factory=True, validated_data={})
        if default not in (None, "", []):
            text += f" [default: {_shown(default)}]"
    if info.annotation is bool:
        return click.Option([f"--{flag}/--no-{flag}", field], default=None, help=text)
    [kind, *_] = _kinds(info.annotation)
    choices = tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()
    metavar = "|".join(filter(None, choices)) or _METAVARS.get(kind, "TEXT")
    is_list = get_origin(info.annotation) is list
    return click.Option(
        [f"--{flag}", field], type=_Text(choices), multiple=is_list, metavar=metavar, help=text
    )


def _flag(field: str) -> str:
    """Return a setting's flag without its dashes."""
    return field.replace("_", "-")


def _kinds(annotation: Any) -> list[Any]:
    """Return the types of a setting's value without None; for a list, the types of its items."""
    if get_origin(annotation) in (Union, types.UnionType, list):
        return [kind for kind in get_args(annotation) if kind is not types.NoneType]
    return [annotation]


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, list):
        return ",".join(map(str, default))
    return str(default)


def _items(text: Any, *, is_text: bool) -> Iterator[Any]:
    if not isinstance(text, str):
        yield text
    elif text.lstrip().startswith("["):
        yield from json.loads(text)
    elif is_text:
        yield text
    else:
        yield from text.split(",")


def _problem(schema: type[Settings], details: ErrorDetails) -> str:
    """Return one line that names the setting and the problem."""
    name = ".".join(map(str, details["loc"]))
    if details["type"] == "extra_forbidden":
        return f"there is no setting {name}{suggestion(name, schema.model_fields)}"
    flag = f"{_flag(name)}: " if name else ""
    if details["type"] == "missing":
        return f"{flag}must be given"
    if details["type"] == "value_error":
        return f"{flag}{details['ctx']['error']}"
    problem = details["msg"].replace("Input should be", "must be")
    return f"{flag}{problem}, not {str(details['input'])[:100]!r}"


# What pyproject.toml's extra "models" installs.
MODEL_LIBRARIES = ("torch", "transformers", "safetensors", "llguidance", "jsonschema")


def need_vllm() -> None:
    """Raise OutriderError(INTERNAL) if vLLM is not installed."""
    found = find_spec("vllm")
    if found is None or found.origin is None:  # without an origin, vllm is a plain folder
        raise OutriderError(Reason.INTERNAL, "the engine vllm needs vLLM, which is not installed")


def need_models() -> None:
    """Raise OutriderError(INTERNAL) if libraries are missing.

    The error names these libraries and the extra that has them.
    """
    missing = [name for name in MODEL_LIBRARIES if find_spec(name) is None]
    if missing:
        need = f"running a model needs {', '.join(missing)}"
        hint = "in Outrider's sources, pip install '.[models]'"
        raise OutriderError(Reason.INTERNAL, f"{need}; {hint}")
