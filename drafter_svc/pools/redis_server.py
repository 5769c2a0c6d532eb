"""Where a Redis is: what a URL of any topology, a password's file and an authority's file say, checked before anything connects."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError

from outrider.errors import invalid

_FORMS = "redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE or redis+cluster://HOST:PORT,HOST:PORT, or rediss for TLS"
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::(?P<port>[0-9]{1,5}))?")
_QUERY = {
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_check_hostname": bool,
    "sentinel_auth": bool,
}

Topology = Literal["standalone", "sentinel", "cluster"]
_TOPOLOGIES: dict[str, Topology] = {"": "standalone", "sentinel": "sentinel", "cluster": "cluster"}


class Credentials(CredentialProvider):
    """User and password, the latter read from its file for each connection, so that it may be changed there."""

    def __init__(self, user: str, password: str, password_file: Path | None) -> None:
        self._user = user
        self._password = password
        self._password_file = password_file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """As AUTH takes them; raises OSError when the file cannot be read."""
        password = (
            self._password
            if self._password_file is None
            else self._password_file.read_text().rstrip("\r\n")
        )
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same; raises AuthenticationError, since after other errors redis-py goes on with the connection, without AUTH."""
        try:
            return self.get_credentials()
        except (OSError, UnicodeDecodeError) as cause:
            raise AuthenticationError(f"{self._password_file} cannot be read") from cause


@dataclass(frozen=True, slots=True)
class RedisServer:
    """Where Redis is, how its servers are found, and how to get in. `service` is Sentinel's name of the master."""

    topology: Topology
    addresses: tuple[tuple[str, int], ...]
    database: int = 0
    service: str = ""
    sentinel_auth: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """What redis-py's connections take for credentials and TLS."""

    @classmethod
    def parse(
        cls, url: str, password_file: Path | None = None, ca_file: Path | None = None
    ) -> RedisServer:
        """Raises OutriderError(INVALID_VALUE) that names the setting and does not repeat the URL, which may hold a password."""
        try:
            parts = urlsplit(url)
            scheme, _, kind = parts.scheme.partition("+")
            topology = _TOPOLOGIES[kind]
            if scheme not in ("redis", "rediss"):
                raise KeyError(scheme)
            addresses = _addresses(
                parts.netloc.rpartition("@")[2], 26379 if topology == "sentinel" else 6379
            )
        except (KeyError, ValueError) as cause:
            raise invalid("redis", f"must look like {_FORMS}") from cause
        if topology == "standalone" and len(addresses) > 1:
            raise invalid(
                "redis", "takes one address, unless the scheme ends with +sentinel or +cluster"
            )
        service, database = _path(parts.path, topology)
        query = _query(parts.query, scheme == "rediss")
        sentinel_auth = bool(query.pop("sentinel_auth", False))
        options = query | _tls(scheme == "rediss", ca_file) | _credentials(parts, password_file)
        return cls(topology, addresses, database, service, sentinel_auth, options)


def _addresses(text: str, default_port: int) -> tuple[tuple[str, int], ...]:
    found = []
    for address in text.split(","):
        match = _ADDRESS.fullmatch(address)
        port = int(match["port"] or default_port) if match else 0
        if match is None or not 0 < port < 65_536:
            raise ValueError(address)
        found.append((match["host"].strip("[]"), port))
    return tuple(found)


def _path(path: str, topology: str) -> tuple[str, int]:
    """Service and database."""
    words = [unquote(word) for word in path.split("/") if word]
    service = words.pop(0) if topology == "sentinel" and words else ""
    if topology == "sentinel" and not service:
        raise invalid(
            "redis",
            "must end with Sentinel's name of the service, as in redis+sentinel://host:26379/mymaster",
        )
    if len(words) > 1 or not all(word.isdecimal() for word in words):
        raise invalid(
            "redis",
            f"must have a number after the last slash for the database, not {'/'.join(words)!r}",
        )
    database = int(words[0]) if words else 0
    if topology == "cluster" and database:
        raise invalid("redis", "takes no database: a cluster has one alone")
    return service, database


def _query(text: str, tls: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        if name not in _QUERY or (name.startswith("ssl_") and not tls):
            raise invalid(
                "redis",
                f"does not take {name!r} here; after the ? may stand {', '.join(_QUERY)}, the ssl ones with rediss",
            )
        if _QUERY[name] is bool and value not in ("true", "false"):
            raise invalid("redis", f"takes {name} as true or false")
        values[name] = value == "true" if _QUERY[name] is bool else value
    return values


def _tls(tls: bool, ca_file: Path | None) -> dict[str, Any]:
    if not tls:
        if ca_file is not None:
            raise invalid("redis-ca-file", "goes with a URL whose scheme begins with rediss")
        return {}
    if ca_file is not None:
        try:
            ssl.create_default_context(cafile=str(ca_file))
        except OSError as cause:
            raise invalid(
                "redis-ca-file",
                f"{ca_file} is no file of PEM certificates: {cause.strerror or cause}",
            ) from cause
        return {"ssl": True, "ssl_ca_certs": str(ca_file)}
    return {"ssl": True}


def _credentials(parts: SplitResult, password_file: Path | None) -> dict[str, Any]:
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if password_file is not None and password:
        raise invalid("redis-password-file", "must not be given where the URL has a password")
    provider = Credentials(user, password, password_file)
    try:
        given = any(provider.get_credentials())
    except (OSError, UnicodeDecodeError) as cause:
        raise invalid(
            "redis-password-file",
            f"{password_file} cannot be read: {getattr(cause, 'strerror', cause)}",
        ) from cause
    if password_file is not None and not provider.get_credentials()[-1]:
        raise invalid("redis-password-file", f"{password_file} is empty")
    return {"credential_provider": provider} if given else {}
