"""Reads the files of mutual TLS, reads them again when they change, and explains refusals.

This module uses no gRPC and no roles. Python's `ssl` and `cryptography` parse the files.
"""

from __future__ import annotations

import logging
import re
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

from outrider.errors import OutriderError, invalid
from outrider.process.files import read_file
from outrider.process.security.roles import Role, peer_of

if TYPE_CHECKING:
    # The package is loaded only when a certificate's contents are needed, which is seldom.
    from cryptography import x509

log = logging.getLogger(__name__)

_Loaded = TypeVar("_Loaded")

# Bad files are tried again at this interval, since for example a new file mode does not change
# their stamp.
_RETRY_S = 1.0

SOCKET_NAME = "localhost"
"""The name that the certificate of a server on a Unix socket must have."""

# The messages in which gRPC and Python's ssl say why they refused the peer's certificate.
_REFUSED = re.compile(
    r"CERTIFICATE_VERIFY_FAILED(?:: |\] certificate verify failed: )(.+?)(?:: OK$| \(_ssl|$)"
)
_CLOSED = ("Socket closed", "Connection reset", "Broken pipe", "Handshake read failed")


@dataclass(frozen=True, slots=True)
class Pems:
    """The contents of the files of `Tls`."""

    cert: bytes
    key: bytes
    ca: bytes | None


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: a certificate chain, its key, and the authorities of the peers' certificates.

    Without `ca`, a server asks its clients for no certificate.
    """

    cert: Path
    key: Path
    ca: Path | None

    @classmethod
    def of(cls, cert: Path | None, key: Path | None, ca: Path | None) -> Tls | None:
        """Return the three files; None if no file is named.

        Raises OutriderError(INVALID_VALUE) if only some are named, if a file cannot be read or
        holds no PEM, or if the key is encrypted or does not belong to the certificate.
        """
        given = {"tls-cert": cert, "tls-key": key, "tls-ca": ca}
        if cert is None or key is None or ca is None:
            missing = [name for name, path in given.items() if path is None]
            if len(missing) == len(given):
                return None
            raise invalid(missing[0], "must be given too: tls-cert, tls-key and tls-ca go together")
        tls = cls(cert, key, ca)
        tls.read()
        return tls

    @classmethod
    def of_server(
        cls, cert: Path | None, key: Path | None, ca: Path | None, prefix: str
    ) -> Tls | None:
        """Return the files of certificate, key and, if `ca` is given, the clients' authorities.

        Return None if no file is named. `prefix` begins the names of the settings. Raises
        OutriderError(INVALID_VALUE) as `of` does.
        """
        if cert is None or key is None:
            if (cert, key, ca) == (None, None, None):
                return None
            missing = "cert" if cert is None else "key"
            together = f"{prefix}-cert and {prefix}-key go together"
            raise invalid(f"{prefix}-{missing}", f"must be given too: {together}")
        tls = cls(cert, key, ca)
        tls.read(prefix)
        return tls

    def read(self, prefix: str = "tls") -> Pems:
        """Return the files' contents. `prefix` begins the names of the settings in errors.

        Raises OutriderError(INVALID_VALUE) that names a file that cannot be read or holds no PEM,
        or a key that is encrypted or does not belong to the certificate.
        """
        pems = Pems(
            _content(f"{prefix}-cert", self.cert),
            _content(f"{prefix}-key", self.key),
            None if self.ca is None else _content(f"{prefix}-ca", self.ca),
        )
        if b"ENCRYPTED" in pems.key:
            problem = f"{self.key} is encrypted, and nobody is there to enter its password"
            raise invalid(f"{prefix}-key", f"{problem}; give a key without a password")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            self.load_pair(context)
        except ssl.SSLError as cause:
            reason = cause.reason or cause
            problem = f"{self.key} does not belong to {self.cert}, or one file is no PEM ({reason})"
            raise invalid(f"{prefix}-key", problem) from cause
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError as cause:
                raise invalid(f"{prefix}-ca", f"{self.ca} holds no PEM certificates") from cause
        return pems

    def load_pair(self, context: ssl.SSLContext) -> None:
        """Load the certificate and its key. Raises ssl.SSLError."""
        # Without a password argument OpenSSL would ask for a password on the terminal, and wait.
        context.load_cert_chain(self.cert, self.key, password=b"")

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return a value that changes when a file changes."""
        paths = [self.cert, self.key, *([] if self.ca is None else [self.ca])]
        return tuple(map(_stamp, paths))

    def common_name(self) -> str:
        """Return the common name of the certificate's subject.

        Raises OutriderError(INVALID_VALUE) if it has none.
        """
        from cryptography import x509
        from cryptography.x509.oid import NameOID

        [cert, *_] = x509.load_pem_x509_certificates(_content("tls-cert", self.cert))
        names = cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        if not names:
            raise invalid("tls-cert", f"{self.cert} has no common name in its subject")
        return str(names[0].value)

    def check_role(self, *roles: Role) -> None:
        """Raise OutriderError(INVALID_VALUE) unless the certificate has one of these roles."""
        from cryptography import x509

        [cert, *_] = x509.load_pem_x509_certificates(_content("tls-cert", self.cert))
        uris: list[str] = []
        with suppress(x509.ExtensionNotFound):
            names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            uris = names.value.get_values_for_type(x509.UniformResourceIdentifier)
        role = peer_of(str(self.cert), uris).role
        if role not in roles:
            wanted = " or ".join(each.value for each in roles)
            raise invalid("tls-cert", f"{self.cert} has the role {role.value}, not {wanted}")

    def own_problem(self) -> str | None:
        """Return why peers would refuse this certificate, as far as these files show.

        Return None if the files show no reason. Peers may have other authorities than `ca`.
        """
        from cryptography import x509  # loaded only for an explanation

        try:
            cert, *chain = x509.load_pem_x509_certificates(read_file(self.cert))
            known = [] if self.ca is None else x509.load_pem_x509_certificates(read_file(self.ca))
        except (OSError, ValueError) as cause:
            return f"the certificate {self.cert} or {self.ca} cannot be read: {cause}"
        now = datetime.now(UTC)
        if now > cert.not_valid_after_utc:
            return f"the certificate {self.cert} has expired ({cert.not_valid_after_utc:%F %T} UTC)"
        if now < cert.not_valid_before_utc:
            start = f"{cert.not_valid_before_utc:%F %T} UTC"
            return f"the certificate {self.cert} is not valid before {start}"
        if known and not any(_signed(cert, authority) for authority in (*chain, *known)):
            return f"no authority in {self.ca} has signed the certificate {self.cert}"
        return None


class TlsSettings(BaseModel):
    """The files with which a process proves its identity and checks the identity of its peers."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    groups: ClassVar[Mapping[str, str]] = {"tls_cert": "Mutual TLS between processes"}

    tls_cert: Path | None = None
    """PEM file with this process's certificate, and the certificates between it and the authority.
    With it, tls-key and tls-ca, all connections between processes use mutual TLS. Changed files are
    read again without a restart."""

    tls_key: Path | None = None
    """PEM file with the certificate's key."""

    tls_ca: Path | None = None
    """PEM file with the authorities that sign the other processes' certificates."""

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        try:
            Tls.of(self.tls_cert, self.tls_key, self.tls_ca)
        except OutriderError as error:
            raise ValueError(error.message) from error
        return self

    @property
    def tls(self) -> Tls | None:
        """The files; None without TLS. Raises OutriderError(INVALID_VALUE) if they are bad."""
        return Tls.of(self.tls_cert, self.tls_key, self.tls_ca)


class WatchedTls(Generic[_Loaded]):
    """Loads the files again when they have changed."""

    def __init__(self, files: Tls, load: Callable[[Tls], _Loaded]) -> None:
        """Raises what `load` raises."""
        self._files = files
        self._load = load
        self._stamp = files.stamp()
        # The stamp of the last files that were bad, and the time when to try them again.
        self._failed: tuple[object, ...] | None = None
        self._retry_at = 0.0
        self.current = load(files)
        """What `load` made of the last files that were valid."""

    def refresh(self) -> bool:
        """Load changed files; return whether `current` is new.

        Bad files, as halfway through a replacement, leave `current` in place. Bad files are loaded
        again when they have changed, and otherwise at most once a second, because any stranger's
        handshake calls this.
        """
        stamp = self._files.stamp()
        now = time.monotonic()
        known = stamp == self._failed
        if stamp == self._stamp or (known and now < self._retry_at):
            return False
        try:
            loaded = self._load(self._files)
        except (OutriderError, OSError) as error:
            if not known:
                log.warning("the earlier certificate stays in use: %s", error)
            self._failed = stamp
            self._retry_at = now + _RETRY_S
            return False
        if self._files.stamp() != stamp:
            # The files changed meanwhile, so a certificate may have another certificate's key.
            return False
        self._stamp = stamp
        self.current = loaded
        return True


def http_context(tls: Tls) -> ssl.SSLContext:
    """Return the TLS context of an HTTP server; each handshake uses the files as they are then.

    If the files have authorities, a client's certificate that none of them signed, or that has
    expired, ends the handshake. Whether a client needs a certificate is up to the server, which can
    say so in an answer.
    """
    watched = WatchedTls(tls, _http_context)
    context = watched.current

    def choose(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        watched.refresh()
        connection.context = watched.current

    # OpenSSL calls `choose` in each handshake, whether or not the client names a server.
    context.sni_callback = choose
    return context


def _http_context(tls: Tls) -> ssl.SSLContext:
    tls.read()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_pair(context)
    if tls.ca is not None:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_OPTIONAL
        # A resumed session would not look at the client's certificate again.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def explain(details: str, tls: Tls | None, *, is_known: bool = False) -> str:
    """Return the details of a failed connection, and add the cause if it lies in TLS.

    If the peer `is_known`, it has accepted a connection before, so a closed connection needs no
    explanation. gRPC tells a client why the client refused a server, but not why a server refused
    the client. The client's own files may show why.
    """
    if tls is None:
        if not is_known and any(word in details for word in _CLOSED):
            hint = "tls-cert, tls-key and tls-ca are not given, and the peer may require them"
            return f"{details} ({hint})"
        return details
    if refused := _REFUSED.search(details):
        reason = f"the peer's certificate is refused: {refused[1]} (authorities: {tls.ca})"
    elif "Hostname Verification Check failed" in details:
        reason = "the peer's certificate has another role or name than the one that was dialled"
    elif "WRONG_VERSION_NUMBER" in details:
        reason = "the peer does not use TLS"
    elif problem := tls.own_problem():
        reason = problem
    elif not is_known and any(word in details for word in _CLOSED):
        reason = f"the peer has ended, or refuses the certificate {tls.cert}"
    else:
        return details
    return f"{reason}; {details}"


def expires_at(cert: Path) -> datetime:
    """Return when the first of a file's certificates, intermediate ones included, expires.

    Raises OutriderError(INVALID_VALUE) if the file cannot be read.
    """
    from cryptography import x509

    try:
        certs = x509.load_pem_x509_certificates(_content("tls-cert", cert))
    except ValueError as cause:
        raise invalid("tls-cert", f"{cert} holds no PEM certificates") from cause
    return min(each.not_valid_after_utc for each in certs)


def _content(field: str, path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as cause:
        raise invalid(field, f"{path} cannot be read: {cause.strerror}") from cause


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _signed(cert: x509.Certificate, authority: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        cert.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
