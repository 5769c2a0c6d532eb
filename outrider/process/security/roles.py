"""The roles in certificates, and the table of the roles that may call each method.

A certificate has its role as the URI outrider://role/NAME among its alternative names, and its
holder's name as the common name of its subject. A certificate without such a URI is a client's.
gRPC's clients cannot see a server's URI, but they check its DNS names. So a server's role is also a
DNS name. Clients of a verifier require this name in place of the host's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from outrider.errors import OutriderError, Reason

URI = "outrider://role/"


class Role(Enum):
    """The role of a process or a person, as its certificate says."""

    GATEWAY = "gateway"
    VERIFIER = "verifier"
    DRAFTER = "drafter"
    TRUSTED_DRAFTER = "trusted-drafter"
    OPERATOR = "operator"
    CLIENT = "client"
    REDIS = "redis"

    @property
    def server_name(self) -> str:
        """The DNS name that a server's certificate has for this role.

        A caller that asks a drafter for its health does not know whether the drafter's
        distributions are trusted, so both kinds of drafters have one name.
        """
        kind = Role.DRAFTER if self is Role.TRUSTED_DRAFTER else self
        return f"{kind.value}.outrider"


_DRAFTERS = frozenset({Role.DRAFTER, Role.TRUSTED_DRAFTER})
_ANY = frozenset(Role)

CALLERS: Mapping[str, frozenset[Role]] = {
    "/outrider.v1.VerifierService/GenerateTokens": frozenset({Role.GATEWAY, Role.OPERATOR}),
    "/outrider.v1.VerifierService/StreamDrafts": _DRAFTERS,
    "/outrider.v1.VerifierService/GetModel": _DRAFTERS | {Role.GATEWAY, Role.OPERATOR},
    "/outrider.internal.v1.TokenStreamService/AgreeVersion": frozenset({Role.GATEWAY}),
    "/outrider.internal.v1.TokenStreamService/StreamTokens": frozenset({Role.GATEWAY}),
    "/outrider.v1.GenerationService/GenerateText": frozenset({Role.CLIENT, Role.OPERATOR}),
    # Health reveals nothing of a request, and every process may ask for it.
    "/grpc.health.v1.Health/Check": _ANY,
    "/grpc.health.v1.Health/List": _ANY,
    "/grpc.health.v1.Health/Watch": _ANY,
    # Clients of a gateway need no certificate, and reflection shows only the public contract.
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": frozenset(
        {Role.CLIENT, Role.OPERATOR}
    ),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": frozenset(
        {Role.CLIENT, Role.OPERATOR}
    ),
}
"""Maps a method's full name to the roles that may call it. Nobody may call any other method."""

HTTP_CALLERS = frozenset({Role.CLIENT, Role.OPERATOR})
"""The roles that may use the gateway's HTTP port."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The peer at the other end of a TLS connection. `name` is "" without a certificate."""

    role: Role
    name: str

    def check_id(self, field: str, given: str) -> None:
        """Raise OutriderError(CERTIFICATE_NOT_ALLOWED) unless the id is this peer's.

        An id is the certificate's common name, or begins with it and a slash.
        """
        if self.name and (given == self.name or given.startswith(f"{self.name}/")):
            return
        message = (
            f"{field} is {given!r}, but the certificate's common name is {self.name!r}; "
            "the id must be that name, or begin with it and a slash"
        )
        raise OutriderError(Reason.CERTIFICATE_NOT_ALLOWED, message, field)


def peer_of_grpc(auth_context: Mapping[str, Iterable[bytes]]) -> Peer | None:
    """Return a gRPC call's peer from its context; None on a connection without TLS.

    Raises OutriderError(CERTIFICATE_NOT_ALLOWED) for a certificate with an unknown role or several
    roles.
    """
    if list(auth_context.get("transport_security_type", ())) != [b"ssl"]:
        return None
    [name, *_] = [*auth_context.get("x509_common_name", ()), b""]
    uris = [uri.decode(errors="replace") for uri in auth_context.get("peer_uri", ())]
    return peer_of(name.decode(errors="replace"), uris)


def peer_of_ssl(certificate: Mapping[str, Any] | None) -> Peer:
    """Return the peer with this certificate, which is as `ssl.SSLSocket.getpeercert` returns it.

    Raises OutriderError(CERTIFICATE_NOT_ALLOWED) as `peer_of` does.
    """
    found = certificate or {}
    pairs = [pair for names in found.get("subject", ()) for pair in names]
    names = [value for key, value in pairs if key == "commonName"]
    uris = [value for kind, value in found.get("subjectAltName", ()) if kind == "URI"]
    return peer_of(next(iter(names), ""), uris)


def peer_of(name: str, uris: Iterable[str]) -> Peer:
    """Return the peer whose certificate has this common name and these alternative URIs.

    Raises OutriderError(CERTIFICATE_NOT_ALLOWED) for an unknown role or several roles.
    """
    roles = [uri.removeprefix(URI) for uri in uris if uri.startswith(URI)]
    if not roles:
        return Peer(Role.CLIENT, name)
    known = {role.value: role for role in Role}
    if len(roles) > 1 or roles[0] not in known:
        message = f"certificate {name!r} must have one role of {', '.join(known)}, not {roles}"
        raise OutriderError(Reason.CERTIFICATE_NOT_ALLOWED, message)
    return Peer(known[roles[0]], name)


def check_call(method: str, peer: Peer | None) -> None:
    """Raise OutriderError(CERTIFICATE_NOT_ALLOWED) unless the peer's role may call the method.

    `method` is a full name as in `CALLERS`. None stands for a peer without TLS, which may call
    nothing.
    """
    allowed = CALLERS.get(method, frozenset())
    if peer is None or peer.role not in allowed:
        _refuse(method.removeprefix("/"), peer, allowed)


def check_http(peer: Peer) -> None:
    """Raise OutriderError(CERTIFICATE_NOT_ALLOWED) unless the peer's role may use HTTP."""
    if peer.role not in HTTP_CALLERS:
        _refuse("the gateway's HTTP API", peer, HTTP_CALLERS)


def _refuse(what: str, peer: Peer | None, allowed: frozenset[Role]) -> None:
    who = "a peer without TLS" if peer is None else f"role {peer.role.value} ({peer.name!r})"
    roles = ", ".join(sorted(role.value for role in allowed)) or "nobody"
    message = f"{who} may not call {what}, which is for {roles}"
    raise OutriderError(Reason.CERTIFICATE_NOT_ALLOWED, message)
