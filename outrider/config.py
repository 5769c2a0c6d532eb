"""One pydantic schema a process for flags, environment and YAML; unknown flags and keys are refused."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, cast

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)
from yaml import YAMLError

_Settings = TypeVar("_Settings", bound="Settings")


class _Environment(EnvSettingsSource):
    """Where a list may be one value as it is, or several in JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        if field.annotation == list[str] and not value.lstrip().startswith("["):
            return [value]
        return super().decode_complex_value(field_name, field, value)


class Settings(BaseSettings):
    """Base of each command's settings. Precedence: flags, environment, the YAML file of `--config`, defaults."""

    model_config = SettingsConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)

    config: Path | None = None
    """YAML file with any of these settings, named with underscores."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls), YamlConfigSettingsSource(settings_cls)


class ServiceSettings(Settings):
    """Of what runs until it is stopped."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe messages that are logged."""

    otlp_endpoint: str = ""
    """OTLP gRPC endpoint that spans are sent to; empty turns tracing off."""

    trace_sample_ratio: float = Field(1.0, ge=0, le=1)
    """Share of the requests that are traced, unless the caller's traceparent decides."""

    otlp_metrics_seconds: float = Field(0.0, ge=0)
    """How often metrics are sent to the OTLP endpoint as well; 0 leaves them to be scraped."""


class ScrapedSettings(ServiceSettings):
    """Of processes that have no HTTP server but for their metrics."""

    metrics_host: str = "127.0.0.1"
    """Address that Prometheus' /metrics listens on."""

    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of Prometheus' /metrics; 0 is off."""


def parse(schema: type[_Settings], program: str, arguments: list[str]) -> _Settings:
    """Read the settings of a process; prints each problem with its setting's name and exits with status 2 on any."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    named = os.environ.get(f"{schema.model_config.get('env_prefix')}CONFIG")
    path = finder.parse_known_args(arguments)[0].config or (Path(named) if named else None)
    if path is not None and not path.is_file():
        _exit(program, f"config: {path} is not a file")

    class WithFile(schema):  # type: ignore[misc, valid-type]  # the file's path is known only now
        model_config = SettingsConfigDict(yaml_file=path)

    WithFile.__name__ = schema.__name__
    source: CliSettingsSource[Any] = CliSettingsSource(
        WithFile,
        cli_prog_name=program,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_parse_args=_whole_items(schema, arguments),
    )
    try:
        return cast(_Settings, WithFile(_cli_settings_source=source))
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc'])).replace('_', '-') or 'settings'}: {e['msg']}" for e in error.errors())
        _exit(program, *problems)
    except (SettingsError, YAMLError) as error:
        _exit(program, f"config: {error}")


def _whole_items(schema: type[Settings], arguments: list[str]) -> list[str]:
    """Quote the values of list flags as JSON, since pydantic-settings would take them apart at commas."""
    lists = {f"--{name.replace('_', '-')}" for name, info in schema.model_fields.items() if info.annotation == list[str]}
    words: list[str] = []
    for word in arguments:
        flag, given, value = word.partition("=")
        if words and words[-1] in lists and not word.startswith("["):
            words.append(json.dumps([word]))
        elif flag in lists and given and not value.startswith("["):
            words += [flag, json.dumps([value])]
        else:
            words.append(word)
    return words


def _exit(program: str, *problems: str) -> NoReturn:
    for problem in problems:
        print(f"{program}: {problem}", file=sys.stderr)
    raise SystemExit(2)
