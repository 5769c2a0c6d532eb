"""The file of API keys: for each key its hash, tenant, limit and expiry, but never the key itself.

A key is 256 random bits, so nobody can find it by trying, and a single SHA-256 hides it. A slow
hash such as bcrypt protects passwords, which people choose. For API keys, a slow hash would cost
each request 100 ms of a core, and callers without a key could make the gateway spend that time too.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from outrider.errors import invalid
from outrider.process.files import read_file

_PREFIX = "outrider-"
_KEY_BYTES = 32
_NEW_FILE_MODE = 0o600


def _at_midnight(value: Any) -> Any:
    """Turn a date without a time into the beginning of that day in UTC."""
    if isinstance(value, date) and not isinstance(value, datetime):
        return datetime.combine(value, time(tzinfo=UTC))
    return value


_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Role = Literal["tenant", "operator"]


class KeyEntry(BaseModel):
    """One API key. A key without `concurrent_sequences` may run any number of sequences."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: _Name
    """The name by which people know the key: `outrider keys` lists and revokes keys by it."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key, as hexadecimal digits."""

    tenant: _Name
    """Requests of the same tenant share caches and n-grams; requests of two tenants do not."""

    role: Role = "tenant"
    """An operator also sees metrics, processes, and sums over all tenants."""

    expires: Annotated[AwareDatetime | None, BeforeValidator(_at_midnight)] = None
    """The key is refused from this time on."""

    concurrent_sequences: Annotated[int | None, Field(ge=1, le=10**12)] = None
    """The most sequences (prompts times n) that the key may have under way at once at a gateway."""


def check_distinct(entries: tuple[KeyEntry, ...]) -> tuple[KeyEntry, ...]:
    """Check the entries and return them. Raises ValueError if two have the same id or hash."""
    for field in ("id", "sha256"):
        counts = Counter(getattr(entry, field) for entry in entries)
        for value, count in counts.items():
            if count > 1:
                raise ValueError(f"{count} keys have the {field} {value}")
    return entries


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: Annotated[tuple[KeyEntry, ...], AfterValidator(check_distinct)]


def parse_keys(text: str, source: str) -> tuple[KeyEntry, ...]:
    """Parse the entries of a YAML or JSON text, `{"keys": [{"id": …}, …]}`.

    Raises OutriderError(INVALID_VALUE) that names `source` and the first problem.
    """
    try:
        return _Keys.model_validate(yaml.safe_load(text) or {}).keys
    except yaml.YAMLError as error:
        # The error has no cause, since the cause's text quotes the file.
        raise invalid(source, f"is not YAML{_place_of(error)}") from None
    except ValidationError as error:
        raise invalid(source, f"holds no valid keys: {_first_problem(error)}") from error
    # PyYAML raises these errors for an impossible date, a vast number, and lists nested too deeply.
    except (ValueError, RecursionError):
        raise invalid(source, "is not YAML: a value in it cannot be read") from None


def _place_of(error: yaml.YAMLError) -> str:
    """Return the problem and its place, without the text there, which may be a secret."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ""
    mark = error.problem_mark
    return f": {error.problem}, in line {mark.line + 1}, column {mark.column + 1}"


def make_entry(fields: Mapping[str, Any]) -> KeyEntry:
    """Return an entry with these fields.

    Raises OutriderError(INVALID_VALUE) for the first wrong field.
    """
    try:
        return KeyEntry.model_validate(fields)
    except ValidationError as error:
        raise invalid("the key", f"cannot be made: {_first_problem(error)}") from error


def _first_problem(error: ValidationError) -> str:
    """Return the place and pydantic's complaint, without the value, which may be a secret."""
    first = error.errors(include_input=False, include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg'].removeprefix('Value error, ')}"


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """Return the entries of a file. Raises OutriderError(INVALID_VALUE) that names the file."""
    try:
        text = read_file(path).decode()
    except OSError as error:
        raise invalid("keys-file", f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise invalid("keys-file", f"{path} is not UTF-8") from error
    return parse_keys(text, f"keys-file {path}")


@contextmanager
def changing_keys(path: Path) -> Iterator[Path]:
    """Lock a file of keys during the `with` block, and yield its path without symbolic links.

    Without the lock, one command could read the file, wait, and write back a key that another
    command has revoked meanwhile. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    # Lock the folder. The file itself gets replaced, and a lock file beside it would have another
    # owner and mode.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(folder)


def write_keys(path: Path, entries: Sequence[KeyEntry]) -> None:
    """Replace a file atomically, so that a gateway never reads half of it.

    Only its owner can read a new file. A replaced file keeps its mode, owner and group, so that a
    gateway can still read the file after root has changed it. Raises OSError.
    """
    old = path.stat() if path.exists() else None
    mode = _NEW_FILE_MODE if old is None else old.st_mode & 0o777
    listed = [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as new:
        try:
            yaml.safe_dump({"keys": listed}, new, sort_keys=False)
            new.flush()
            os.fsync(new.fileno())
            if old is not None:
                _keep_owner(new.fileno(), old)
            os.fchmod(new.fileno(), mode)
            os.replace(new.name, path)
        finally:
            Path(new.name).unlink(missing_ok=True)


def _keep_owner(file: int, old: os.stat_result) -> None:
    """Give an open file the owner and group of an older file, unless it has them."""
    new = os.fstat(file)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        os.fchown(file, old.st_uid, old.st_gid)


def new_key() -> str:
    """Return a random key of 256 bits. Its prefix lets scanners find keys in public text."""
    return f"{_PREFIX}{secrets.token_urlsafe(_KEY_BYTES)}"


def key_digest(key: str) -> str:
    """Return the SHA-256 of a key in the file's form: hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()
