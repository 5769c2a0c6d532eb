"""Where a Redis is and how to log in, and redis-py's client of it.

URL, password file and file of authorities are checked before a connection is made.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError

from outrider.errors import invalid
from outrider.process.files import check_file, read_file
from outrider.process.security.tls import Tls, explain

_FORMS = (
    "redis://HOST:PORT/DB, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE "
    "or redis+cluster://HOST:PORT,HOST:PORT, or rediss for TLS"
)
# The options of redis-py that a URL may have after the ?, all of TLS.
_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname")

Client = Redis | RedisCluster

Topology = Literal["standalone", "sentinel", "cluster"]
_TOPOLOGIES: dict[str, Topology] = {"": "standalone", "sentinel": "sentinel", "cluster": "cluster"}


class Credentials(CredentialProvider):
    """User and password. The password's file is read for each connection, so it may change."""

    def __init__(self, user: str, password: str, password_file: Path | None) -> None:
        self._user = user
        self._password = password
        self._password_file = password_file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """The arguments of AUTH; raises OSError or UnicodeDecodeError if the file is unreadable."""
        password = self._password
        if self._password_file is not None:
            password = read_file(self._password_file).decode().rstrip("\r\n")
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same, but raises AuthenticationError if the file is unreadable.

        After any other error redis-py would use the connection without AUTH.
        """
        try:
            return self.get_credentials()
        except (OSError, UnicodeDecodeError) as cause:
            raise AuthenticationError(f"{self._password_file} cannot be read") from cause


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

    def client(self, timeout_s: float, connect_s: float, **own: Any) -> Client:
        """redis-py's client, which connects with its first command.

        `timeout_s` bounds each command and `connect_s` each connection. `own` are redis-py's
        arguments for connections to the servers, but not to Sentinels.
        """
        # With RESP2 and no driver_info a connection begins with AUTH and SELECT alone, for which a
        # user needs no permissions.
        common: dict[str, Any] = {
            "protocol": 2,
            "driver_info": None,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": connect_s,
            # Retry once on a new connection: a pooled connection may lead to a server that is gone.
            "retry": Retry(NoBackoff(), 1),
        }
        servers = {**common, **self.options, **own}
        if self.topology == "cluster":
            nodes = [ClusterNode(host, port) for host, port in self.addresses]
            # Always ask the given addresses for the slots: they may be names that move to other
            # hosts.
            return RedisCluster(startup_nodes=nodes, dynamic_startup_nodes=False, **servers)
        if self.topology == "standalone":
            [(host, port)] = self.addresses
            return Redis(host=host, port=port, db=self.database, **servers)
        login = dict(self.options)
        if not self.sentinel_auth:
            login.pop("credential_provider", None)
        # redis-py's Sentinel has no types.
        make_sentinel: Any = Sentinel
        sentinel = make_sentinel(self.addresses, sentinel_kwargs=common | login)
        master: Redis = sentinel.master_for(self.service, db=self.database, **servers)
        return master

    @classmethod
    def parse(
        cls,
        url: str,
        password_file: Path | None = None,
        tls: Tls | None = None,
    ) -> RedisServer:
        """Check a URL and the files that go with it. `tls` has this process's certificate.

        Raises OutriderError(INVALID_VALUE) that names the setting. The message does not repeat the
        URL, which may hold a password.
        """
        scheme, _, rest = url.partition("://")
        scheme, _, kind = scheme.partition("+")
        rest, _, query = rest.partition("?")
        login, at, rest = rest.rpartition("@")
        servers, _, path = rest.partition("/")
        try:
            topology = _TOPOLOGIES[kind]
            if scheme not in ("redis", "rediss"):
                raise KeyError(scheme)
            # redis-py's URLs have one server each.
            urls = [f"{scheme}://{login}{at}{server}/?{query}" for server in servers.split(",")]
            parsed: list[dict[str, Any]] = [dict(parse_url(single)) for single in urls]
            default_port = 26379 if topology == "sentinel" else 6379
            addresses = tuple((each["host"], each.get("port", default_port)) for each in parsed)
        except (KeyError, ValueError) as cause:
            raise invalid("redis", f"must look like {_FORMS}") from cause
        if topology == "standalone" and len(addresses) > 1:
            message = "takes one address, unless the scheme ends with +sentinel or +cluster"
            raise invalid("redis", message)
        service, database = _path(unquote(path), topology)
        given = parsed[0]
        sentinel_auth = given.pop("sentinel_auth", "false")
        if sentinel_auth not in ("true", "false"):
            raise invalid("redis", "takes sentinel_auth as true or false")
        use_tls = given.pop("connection_class", None) is not None
        login_options = _credentials(
            given.pop("username", ""), given.pop("password", ""), password_file
        )
        own = {name: value for name, value in given.items() if name not in ("host", "port")}
        if wrong := next((name for name in own if not use_tls or name not in _OPTIONS), None):
            names = f"sentinel_auth, and with rediss {', '.join(_OPTIONS)}"
            raise invalid("redis", f"does not take {wrong!r} here; after the ? it takes {names}")
        options = _tls(use_tls, tls) | own | login_options
        _check_authorities(options.get("ssl_ca_certs"))
        return cls(topology, addresses, database, service, sentinel_auth == "true", options)


def _path(path: str, topology: str) -> tuple[str, int]:
    """The service, for Sentinel alone, and the number of the database, 0 unless given."""
    service, number = "", path
    if topology == "sentinel":
        service, _, number = path.partition("/")
        if not service:
            example = "redis+sentinel://host:26379/mymaster"
            raise invalid("redis", f"must end with Sentinel's name of the service, as in {example}")
    if number and not number.isdecimal():
        message = f"must have a number after the last slash for the database, not {number!r}"
        raise invalid("redis", message)
    database = int(number or 0)
    if topology == "cluster" and database:
        raise invalid("redis", "takes no database: a cluster has only one")
    return service, database


def _tls(use_tls: bool, tls: Tls | None) -> dict[str, Any]:
    """redis-py's arguments for TLS with this process's files; empty without TLS."""
    if not use_tls:
        return {}
    own: dict[str, Any] = {"ssl": True}
    if tls is not None:
        own |= {"ssl_certfile": str(tls.cert), "ssl_keyfile": str(tls.key)}
        own |= {"ssl_ca_certs": str(tls.ca)}
    return own


def _check_authorities(file: str | None) -> None:
    """Read the file of certificates that Redis's certificate must be signed by.

    redis-py would read it only for the first connection. Raises OutriderError(INVALID_VALUE) that
    names the file.
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
    """redis-py's argument for the URL's user and the password; empty without both."""
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
    """Close all connections of the clients, also if one fails; then raise the first failure."""
    closing = [client.aclose() for client in clients]
    for client in clients:
        if isinstance(client, RedisCluster):
            continue
        pool = client.connection_pool
        if isinstance(pool, SentinelConnectionPool):
            closing += [sentinel.aclose() for sentinel in pool.sentinel_manager.sentinels]
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
