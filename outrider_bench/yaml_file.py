"""Reads a YAML file into a pydantic model; an error is one line that names file and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

_Model = TypeVar("_Model", bound=BaseModel)


def read(path: Path, schema: type[_Model], **given: Any) -> _Model:
    """Read a file; `given` are values of fields that replace the file's values.

    Raises ValueError that names the file, the field and the problem.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ValueError(f"{path}: each line must be a field and its value, as in seed: 1")
    try:
        return schema.model_validate(values | given)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_problem(error)}") from error


def first_problem(error: ValidationError) -> str:
    """Return the first problem that pydantic found, with the path of its field."""
    details = error.errors()[0]
    place = ".".join(map(str, details["loc"]))
    message = str(details["msg"]).removeprefix("Value error, ")
    if details["type"] == "extra_forbidden":
        message = "there is no such field"
    if place:
        return f"{place}: {message}"
    return message
