"""Describes a Redis and how to log in, and makes redis-py's client for it.

URL, password file and file of authorities are checked before a connection is made.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError

from outrider.errors import invalid
from outrider.process.files import check_file, read_file
from outrider.process.redis.replies import bound_replies
from outrider.process.security.tls import Tls, explain

_FORM = "must be a URL such as redis://USER@HOST:6379/0, or rediss://USER@HOST:6379/0 with TLS"
# The options of redis-py that a URL may have after the ?, all for TLS. redis-py itself takes any
# option from a URL, even time-outs.
_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")

Client = Redis | RedisCluster


class Credentials(CredentialProvider):
    """The user and password. The password's file is read for each connection, so it may change."""

    def __init__(self, user: str, password: str, password_file: Path | None) -> None:
        self._user = user
        self._password = password
        self._password_file = password_file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the arguments of AUTH.

        Raises OSError or UnicodeDecodeError if the file is unreadable.
        """
        password = self._password
        if self._password_file is not None:
            password = read_file(self._password_file).decode().rstrip("\r\n")
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Like `get_credentials`, but raises AuthenticationError if the file is unreadable.

        After any other error redis-py would use the connection without AUTH.
        """
        try:
            return self.get_credentials()
        except (OSError, UnicodeDecodeError) as cause:
            raise AuthenticationError(f"{self._password_file} cannot be read") from cause


@dataclass(frozen=True, slots=True)
class RedisServer:
    """The address and credentials of a Redis; for a cluster, the addresses of some nodes."""

    addresses: tuple[tuple[str, int], ...]
    is_cluster: bool = False
    database: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    """redis-py's keyword arguments for credentials and TLS."""

    def reason(self, error: Exception) -> str:
        """Return the error's text, with its cause in TLS if there is one."""
        if "ssl" not in self.options:
            return str(error)
        return explain(str(error), self.tls)

    @property
    def tls(self) -> Tls | None:
        """The files with which a client proves its identity; None for a client without them."""
        names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
        cert, key, ca = (self.options.get(name) for name in names)
        return Tls(Path(cert), Path(key), ca and Path(ca)) if cert and key else None

    def client(self, timeout_s: float, connect_s: float, **own: Any) -> Client:
        """Return redis-py's client, which connects with its first command and bounds each reply.

        `timeout_s` bounds each command and `connect_s` each connection. `own` are further arguments
        of redis-py.
        """
        # With RESP2 and no driver_info a connection begins with only AUTH and SELECT, for which a
        # user needs no permissions.
        servers: dict[str, Any] = {
            "protocol": 2,
            "driver_info": None,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": connect_s,
            # Retry once on a new connection: a pooled connection may lead to a server that is gone.
            "retry": Retry(NoBackoff(), 1),
            **self.options,
            **own,
        }
        client: Client
        if self.is_cluster:
            nodes = [ClusterNode(host, port) for host, port in self.addresses]
            # Always ask the given addresses for the slots: they may be names that move to other
            # hosts.
            client = RedisCluster(startup_nodes=nodes, dynamic_startup_nodes=False, **servers)
        else:
            [(host, port)] = self.addresses
            client = Redis(host=host, port=port, db=self.database, **servers)
        bound_replies(client)
        return client

    @classmethod
    def parse(
        cls,
        urls: str,
        password_file: Path | None = None,
        tls: Tls | None = None,
        *,
        is_cluster: bool = False,
    ) -> RedisServer:
        """Check a URL, or a cluster's URLs with commas between them, and the files that go with it.

        `tls` has this process's certificate. Raises OutriderError(INVALID_VALUE) that names the
        setting. The message does not repeat the URL, which may hold a password.
        """
        parsed = [_parsed(url) for url in urls.split(",")]
        addresses = tuple(
            (each.pop("host", "localhost"), each.pop("port", 6379)) for each in parsed
        )
        given = parsed[0]
        if len(parsed) > 1 and not is_cluster:
            raise invalid("redis", "takes one URL, unless redis-cluster is given too")
        if any(each != given for each in parsed):
            raise invalid("redis", "must have the same user, password and options in each URL")
        database = given.pop("db", 0)
        if is_cluster and database:
            raise invalid("redis", "takes no database: a cluster has only one")
        use_tls = given.pop("connection_class", None) is not None
        login = _credentials(given.pop("username", ""), given.pop("password", ""), password_file)
        options = _tls(use_tls, tls) | given | login
        _check_authorities(options.get("ssl_ca_certs"))
        return cls(addresses, is_cluster, database, options)


def _parsed(url: str) -> dict[str, Any]:
    """Return redis-py's arguments for a URL.

    Raises OutriderError(INVALID_VALUE) if `url` is no Redis URL, or has options other than TLS's.
    """
    try:
        parts, parsed = urlsplit(url), dict(parse_url(url))
    except ValueError as cause:
        raise invalid("redis", _FORM) from cause
    # redis-py ignores a path that is no number.
    if parts.scheme not in ("redis", "rediss") or not re.fullmatch(r"/?\d*", parts.path):
        raise invalid("redis", _FORM)
    taken = _OPTIONS if parts.scheme == "rediss" else ()
    if wrong := next((name for name in parse_qs(parts.query) if name not in taken), None):
        names = ", ".join(_OPTIONS)
        message = f"does not take {wrong!r} here; with rediss it takes {names} after the ?"
        raise invalid("redis", message)
    return parsed


def _tls(use_tls: bool, tls: Tls | None) -> dict[str, Any]:
    """Return redis-py's arguments for TLS with this process's files; empty without TLS."""
    if not use_tls:
        return {}
    own: dict[str, Any] = {"ssl": True}
    if tls is not None:
        own |= {"ssl_certfile": str(tls.cert), "ssl_keyfile": str(tls.key)}
        own |= {"ssl_ca_certs": str(tls.ca)}
    return own


def _check_authorities(file: str | None) -> None:
    """Read the authorities' certificates, one of which must have signed Redis's certificate.

    redis-py would read the file only for the first connection. Raises OutriderError(INVALID_VALUE)
    that names the file.
    """
    if file is None:
        return
    try:
        check_file(Path(file))
        ssl.create_default_context(cafile=file)
    except OSError as cause:
        message = f"ssl_ca_certs: {file} is no file of PEM certificates: {cause.strerror or cause}"
        raise invalid("redis", message) from cause


def _credentials(user: str, password: str, password_file: Path | None) -> dict[str, Any]:
    """Return redis-py's argument for user and password; empty if neither is given."""
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


async def close(*clients: Client) -> None:
    """Close all connections of the clients, even if one fails to close; raise the first failure."""
    closing = [client.aclose() for client in clients]
    failures = await asyncio.gather(*closing, return_exceptions=True)
    for client in clients:
        if isinstance(client, RedisCluster):
            # After a failure the client believes that it is closed, but its connections are open.
            nodes = client.nodes_manager
            more = (nodes.aclose(), nodes.aclose("startup_nodes"))
            failures += await asyncio.gather(*more, return_exceptions=True)
    for failure in failures:
        if failure is not None:
            raise failure
