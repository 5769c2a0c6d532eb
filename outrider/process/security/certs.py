"""`outrider certs`: a private authority and a certificate for each role, for small sites and tests.

Keys are ECDSA on P-256 without a password, in files that only their owner reads.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from outrider.errors import invalid
from outrider.process.security.roles import URI, Role
from outrider.process.security.tls import SOCKET_NAME

_AUTHORITY_DAYS = 3650
LOCAL_NAMES = (SOCKET_NAME, "127.0.0.1", "::1")
"""Names that all certificates except drafters' have, for processes on one machine."""
# Clocks of other machines may be behind.
_SKEW = timedelta(minutes=5)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NAMES = tuple(role.value for role in Role)
"""The kinds of certificates that can be made."""
# Clients of a gateway or a Redis check the host's name and no role. A drafter's certificate has
# only the name of its role, so that the drafter cannot pose as a gateway or a Redis.
_DRAFTERS = (Role.DRAFTER, Role.TRUSTED_DRAFTER)
_SERVERS = (Role.GATEWAY, Role.VERIFIER, Role.REDIS, *_DRAFTERS)


@dataclass(frozen=True, slots=True)
class Authority:
    """A private authority: its certificate, and the key that signs."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls) -> Authority:
        """Make an authority.

        Each authority has a unique name, so that errors distinguish two authorities.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        name = _subject(f"Outrider authority {secrets.token_hex(4)}")
        usages = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = _builder(name, name, key.public_key(), timedelta(days=_AUTHORITY_DAYS))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(usages, True)
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, directory: Path) -> Authority:
        """Read an authority; raise OutriderError(INVALID_VALUE) that names a bad file."""
        cert_path, key_path = directory / "ca.pem", directory / "ca.key"
        try:
            cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
            key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        except (OSError, ValueError, TypeError) as cause:
            problem = f"{cert_path} and {key_path} cannot be read as an authority: {cause}"
            raise invalid("dir", f"{problem}; if both are missing, another is made") from cause
        if not isinstance(key, ec.EllipticCurvePrivateKey) or cert.public_key() != key.public_key():
            raise invalid("dir", f"{key_path} is not the key of {cert_path}")
        return cls(cert, key)

    def issue(
        self, kind: str, name: str, hosts: Sequence[str], valid_for: timedelta
    ) -> tuple[bytes, bytes]:
        """Return a certificate and its key, as PEM. `kind` is its role, one of `NAMES`.

        `name` is its common name. Its other names are `hosts` (DNS names and IP addresses),
        `LOCAL_NAMES` and the name of its role. But a drafter's certificate has only the name of its
        role. For tests, the certificate may have expired already. The certificate ends when the
        authority's certificate ends, or earlier.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        role = Role(kind)
        own = [] if role in _DRAFTERS else [*hosts, *LOCAL_NAMES]
        names = [_general_name(host) for host in dict.fromkeys([*own, role.server_name])]
        names.append(x509.UniformResourceIdentifier(f"{URI}{kind}"))
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if role in _SERVERS:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        left = self.cert.not_valid_after_utc - datetime.now(UTC)
        subject, issuer = _subject(name), self.cert.subject
        builder = _builder(subject, issuer, key.public_key(), min(valid_for, left))
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        cert = builder.add_extension(issuer_key, False).sign(self.key, hashes.SHA256())
        return cert.public_bytes(serialization.Encoding.PEM), _pem(key)

    def write(self, directory: Path) -> None:
        """Write ca.pem and ca.key."""
        _write(directory / "ca.pem", self.cert.public_bytes(serialization.Encoding.PEM), 0o644)
        _write(directory / "ca.key", _pem(self.key), 0o600)

    def write_issued(
        self, directory: Path, kind: str, name: str, hosts: Sequence[str], valid_for: timedelta
    ) -> None:
        """Issue a certificate, and write it to NAME.pem with its key in NAME.key."""
        cert, key = self.issue(kind, name, hosts, valid_for)
        _write(directory / f"{name}.key", key, 0o600)
        _write(directory / f"{name}.pem", cert, 0o644)


def run(
    directory: Path,
    hosts: Sequence[str],
    roles: Sequence[str],
    name: str | None,
    days: int,
) -> int:
    """Write the certificates and say where they are; return the exit status.

    Raises OutriderError(INVALID_VALUE) that names a wrong setting.
    """
    names = [host.strip() for text in hosts for host in text.split(",")]
    for host in names:
        # `_general_name` raises before anything is written.
        _general_name(host)
    if name is not None and (len(roles) != 1 or not _NAME.fullmatch(name) or name == "ca"):
        raise invalid("name", "takes letters, digits, dots and hyphens, for a single --role")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(directory)
        for kind in roles or NAMES:
            authority.write_issued(directory, kind, name or kind, names, timedelta(days=days))
    except OSError as cause:
        raise invalid("dir", f"{directory} cannot be written: {cause.strerror}") from cause
    made = name or ", ".join(roles or NAMES)
    on = ", ".join(dict.fromkeys([*names, *LOCAL_NAMES]))
    print(f"{directory}: certificates for {made}, valid for {days} days, for the hosts {on}")
    return 0


def _authority(directory: Path) -> Authority:
    """Return the authority of the directory; a new authority if the directory has none."""
    if (directory / "ca.pem").exists() or (directory / "ca.key").exists():
        return Authority.load(directory)
    authority = Authority.new()
    authority.write(directory)
    return authority


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid_for: timedelta
) -> x509.CertificateBuilder:
    end = datetime.now(UTC) + valid_for
    builder = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
    builder = builder.not_valid_before(min(datetime.now(UTC), end) - _SKEW).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    """Return the alternative name of a host.

    Raises OutriderError(INVALID_VALUE) for any other text.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", host):
            raise invalid("host", f"must name hosts or IP addresses, not {host!r}") from None
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace a file at once, so that no process reads half of it."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    partial.rename(path)
