"""`--check-config`: check settings and files, print what would be used, and start nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from outrider.errors import OutriderError, Reason, invalid
from outrider.process.files import read_file
from outrider.process.security.roles import Role
from outrider.process.security.tls import Tls, expires_at
from outrider.process.settings.config import ServiceSettings

# Settings of this command, which the process itself does not use.
_OWN = {"config", "check_config"}
# Settings with paths that the process creates itself.
_MADE = {"uds"}
_URL = re.compile(r"^(?P<scheme>[A-Za-z][\w+.-]*)://(?P<rest>.*)$", re.DOTALL)
_HIDDEN = "***"


def check_config(
    settings: ServiceSettings, program: str, check: Callable[[], object] = lambda: None
) -> None:
    """If the process could use the settings, print them as YAML, without passwords and keys.

    `check` raises OutriderError for problems that only this process can find. If there is a
    problem, the command prints one sentence and exits with status 1.
    """
    try:
        for name, value in settings:
            if isinstance(value, Path) and name not in _MADE:
                check_file(name.replace("_", "-"), value)
        check()
    except OutriderError as error:
        raise SystemExit(f"{program}: {error}") from error
    print(f"# {program} can use these settings:")
    print(yaml.safe_dump(_shown(settings), sort_keys=False, allow_unicode=True), end="")


def check_model(setting: str, model: str) -> None:
    """Raise OutriderError(MODEL_NOT_FOUND) unless a model has a configuration and a tokenizer."""
    from outrider.tokenizer import model_file  # loads the hub's library

    for name in ("config.json", "tokenizer.json"):
        if model_file(model, name) is None:
            raise OutriderError(
                Reason.MODEL_NOT_FOUND, f"{setting}: {model} has no {name}", setting
            )


def check_address(setting: str, address: str) -> None:
    """Raise OutriderError(INVALID_VALUE) unless an address is host:port or unix:/path."""
    host, _, port = address.rpartition(":")
    if address.startswith("unix:") or (host and port.isdecimal() and int(port) <= 65535):
        return
    raise invalid(setting, f"must be host:port or unix:/path, not {address!r}")


def check_certificate(prefix: str, tls: Tls | None, *roles: Role) -> None:
    """Raise OutriderError(INVALID_VALUE) if a certificate has expired or has none of the roles."""
    if tls is None:
        return
    if (end := expires_at(tls.cert)) < datetime.now(UTC):
        raise invalid(f"{prefix}-cert", f"{tls.cert} has expired ({end:%F %T} UTC)")
    if roles:
        tls.check_role(*roles)


def check_file(setting: str, path: Path) -> None:
    """Raise OutriderError(INVALID_VALUE) for a file that cannot be read. A directory passes."""
    try:
        if not path.is_dir():
            read_file(path)
    except OSError as cause:
        raise invalid(setting, f"{path} cannot be read: {cause.strerror}") from cause


def _shown(settings: ServiceSettings) -> dict[str, Any]:
    """Return the settings, keyed by name, as a file of `--config` has them."""
    given = settings.model_dump(mode="json", exclude=_OWN)
    shown = {name: _masked(value) for name, value in given.items() if value not in (None, "", [])}
    return shown | ({"keys": _HIDDEN} if "keys" in shown else {})


def _masked(value: Any) -> Any:
    """Return the value, without parts of URLs that may be secret: passwords, tokens and options."""
    if isinstance(value, list):
        return [_masked(item) for item in value]
    if not isinstance(value, str) or (url := _URL.match(value)) is None:
        return value
    login, at, rest = url["rest"].rpartition("@")
    user, colon, _ = login.partition(":")
    if re.search(r"[/?#]", login):
        # Here it is unclear where the password ends, so everything after the scheme is hidden.
        return f"{url['scheme']}://{_HIDDEN}"
    # Redis has named users. In other URLs even the user's name may be a token.
    if not url["scheme"].startswith("redis"):
        user = user and _HIDDEN
    if colon:
        user = f"{user}:{_HIDDEN}"
    place, mark, _ = re.split(r"([?#])", f"{rest}?", maxsplit=1)
    options = _HIDDEN if len(place) < len(rest) else ""
    return f"{url['scheme']}://{user}{at}{place}{mark if options else ''}{options}"
