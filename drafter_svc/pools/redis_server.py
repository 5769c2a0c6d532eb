"""Where a Redis is and how to log in: reads the URL, the password file and the file of authorities.

Everything is checked before a connection is made.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from outrider.process.redis_credentials import Credentials
from outrider.process.tls import Tls, explain
from outrider.protocol.errors import invalid

_FORMS = (
    "redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE "
    "or redis+cluster://HOST:PORT,HOST:PORT, or rediss for TLS"
)
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::(?P<port>[0-9]{1,5}))?")
_QUERY = {
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_check_hostname": bool,
    "sentinel_auth": bool,
}

Topology = Literal["standalone", "sentinel", "cluster"]
_TOPOLOGIES: dict[str, Topology] = {"": "standalone", "sentinel": "sentinel", "cluster": "cluster"}


@dataclass(frozen=True, slots=True)
class RedisServer:
    """The addresses, topology and credentials of a Redis.

    `service` is Sentinel's name for the group of servers; empty for other topologies.
    """

    topology: Topology
    addresses: tuple[tuple[str, int], ...]
    database: int = 0
    service: str = ""
    sentinel_auth: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """redis-py's keyword arguments for credentials and TLS."""

    def reason(self, error: Exception) -> str:
        """The error's text, with its cause in TLS if there is one."""
        if "ssl" not in self.options:
            return str(error)
        return explain(str(error), self.tls)

    @property
    def tls(self) -> Tls | None:
        """The files with which a client shows who it is; None if it shows nothing."""
        names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
        cert, key, ca = (self.options.get(name) for name in names)
        return Tls(Path(cert), Path(key), ca and Path(ca)) if cert and key else None

    @classmethod
    def parse(
        cls,
        url: str,
        password_file: Path | None = None,
        ca_file: Path | None = None,
        tls: Tls | None = None,
    ) -> RedisServer:
        """Check a URL and the files that go with it. `tls` has this process's certificate.

        Raises OutriderError(INVALID_VALUE) that names the setting. The message does not repeat the
        URL, which may hold a password.
        """
        try:
            parts = urlsplit(url)
            scheme, _, kind = parts.scheme.partition("+")
            topology = _TOPOLOGIES[kind]
            if scheme not in ("redis", "rediss"):
                raise KeyError(scheme)
            default_port = 26379 if topology == "sentinel" else 6379
            addresses = _addresses(parts.netloc.rpartition("@")[2], default_port)
        except (KeyError, ValueError) as cause:
            raise invalid("redis", f"must look like {_FORMS}") from cause
        if topology == "standalone" and len(addresses) > 1:
            message = "takes one address, unless the scheme ends with +sentinel or +cluster"
            raise invalid("redis", message)
        service, database = _path(parts.path, topology)
        use_tls = scheme == "rediss"
        query = _query(parts.query, use_tls)
        sentinel_auth = bool(query.pop("sentinel_auth", False))
        options = _tls(use_tls, ca_file, tls) | query | _credentials(parts, password_file)
        return cls(topology, addresses, database, service, sentinel_auth, options)


def _addresses(text: str, default_port: int) -> tuple[tuple[str, int], ...]:
    """The (host, port) pairs of a list; raises ValueError for one that is not HOST or HOST:PORT."""
    found = []
    for address in text.split(","):
        match = _ADDRESS.fullmatch(address)
        port = int(match["port"] or default_port) if match else 0
        if match is None or not 0 < port < 65_536:
            raise ValueError(address)
        found.append((match["host"].strip("[]"), port))
    return tuple(found)


def _path(path: str, topology: str) -> tuple[str, int]:
    """The service, for Sentinel alone, and the number of the database, 0 unless given."""
    words = [unquote(word) for word in path.split("/") if word]
    service = words.pop(0) if topology == "sentinel" and words else ""
    if topology == "sentinel" and not service:
        example = "redis+sentinel://host:26379/mymaster"
        raise invalid("redis", f"must end with Sentinel's name of the service, as in {example}")
    if len(words) > 1 or not all(word.isdecimal() for word in words):
        path = "/".join(words)
        message = f"must have a number after the last slash for the database, not {path!r}"
        raise invalid("redis", message)
    database = int(words[0]) if words else 0
    if topology == "cluster" and database:
        raise invalid("redis", "takes no database: a cluster has only one")
    return service, database


def _query(text: str, use_tls: bool) -> dict[str, Any]:
    """The options behind the ?, with their values; the ssl ones need TLS."""
    values: dict[str, Any] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        if name not in _QUERY or (name.startswith("ssl_") and not use_tls):
            options = f"after the ? it takes {', '.join(_QUERY)}, the ssl ones with rediss"
            raise invalid("redis", f"does not take {name!r} here; {options}")
        if _QUERY[name] is not bool:
            values[name] = value
        elif value in ("true", "false"):
            values[name] = value == "true"
        else:
            raise invalid("redis", f"takes {name} as true or false")
    return values


def _tls(use_tls: bool, ca_file: Path | None, tls: Tls | None) -> dict[str, Any]:
    """redis-py's arguments for TLS; none without it."""
    if not use_tls:
        if ca_file is not None:
            raise invalid("redis-ca-file", "goes with a URL whose scheme begins with rediss")
        return {}
    own: dict[str, Any] = {"ssl": True}
    if tls is not None:
        own |= {"ssl_certfile": str(tls.cert), "ssl_keyfile": str(tls.key)}
        own |= {"ssl_ca_certs": str(tls.ca)}
    if ca_file is not None:
        try:
            ssl.create_default_context(cafile=str(ca_file))
        except OSError as cause:
            message = f"{ca_file} is no file of PEM certificates: {cause.strerror or cause}"
            raise invalid("redis-ca-file", message) from cause
        own["ssl_ca_certs"] = str(ca_file)
    return own


def _credentials(parts: SplitResult, password_file: Path | None) -> dict[str, Any]:
    """redis-py's argument for the URL's user and the password; none without either."""
    user = unquote(parts.username or "")
    password = unquote(parts.password or "")
    if password_file is not None and password:
        raise invalid("redis-password-file", "must not be given where the URL has a password")
    provider = Credentials(user, password, password_file)
    try:
        given = any(provider.get_credentials())
    except (OSError, UnicodeDecodeError) as cause:
        reason = getattr(cause, "strerror", cause)
        raise invalid("redis-password-file", f"{password_file} cannot be read: {reason}") from cause
    if password_file is not None and not provider.get_credentials()[-1]:
        raise invalid("redis-password-file", f"{password_file} is empty")
    return {"credential_provider": provider} if given else {}
