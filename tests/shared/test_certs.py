"""`outrider certs` makes an authority and certificates with roles, and renews them."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from outrider.process.security.certs import NAMES
from outrider.process.security.roles import Peer, Role, peer_of_ssl
from outrider.process.security.tls import Tls
from outrider.process.settings.usage import invoke
from outrider_cli.main import app
from tests.certificates import Site


def certs(directory: Path, *words: str) -> int:
    status: int = invoke(app, "outrider", ["certs", str(directory), *words])
    return status


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_each_role_gets_a_certificate_that_the_authority_signed(tmp_path: Path) -> None:
    assert certs(tmp_path, "--host", "gpu1,10.0.0.5", "--host", "::1") == 0
    authority = load(tmp_path / "ca.pem")
    for name in NAMES:
        tls = Tls.of(tmp_path / f"{name}.pem", tmp_path / f"{name}.key", tmp_path / "ca.pem")
        assert tls is not None
        assert tls.own_problem() is None
        assert tls.common_name() == name
        cert = load(tls.cert)
        cert.verify_directly_issued_by(authority)
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = {str(one.value) for one in names} - {f"outrider://role/{name}"}
        if name in ("drafter", "trusted-drafter"):
            # Clients of a gateway check only host names, so a drafter's certificate has no host
            # name.
            assert found == {"drafter.outrider"}
        else:
            assert found == {
                "gpu1",
                "localhost",
                f"{name}.outrider",
                "10.0.0.5",
                "127.0.0.1",
                "::1",
            }
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        assert uris == [f"outrider://role/{name}"]


def test_only_the_owner_reads_the_keys(tmp_path: Path) -> None:
    certs(tmp_path / "new")
    keys = list((tmp_path / "new").glob("*.key"))
    assert len(keys) == len(NAMES) + 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_the_command_renews_certificates_and_keeps_the_authority(
    tmp_path: Path,
) -> None:
    certs(tmp_path, "--days", "1")
    authority, old = (tmp_path / "ca.pem").read_bytes(), load(tmp_path / "drafter.pem")
    assert old.not_valid_after_utc < datetime.now(UTC) + timedelta(days=1, minutes=1)
    certs(tmp_path, "--role", "drafter", "--days", "30")
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert load(tmp_path / "drafter.pem").not_valid_after_utc > old.not_valid_after_utc
    for name in ("ca.pem", "ca.key"):
        (tmp_path / name).unlink()
    certs(tmp_path)
    assert (tmp_path / "ca.pem").read_bytes() != authority


WRONG = [
    (["--host", "a b"], "host must name hosts or IP addresses, not 'a b'"),
    (["--role", "king"], "role: must be one of gateway, verifier, drafter, "),
    (["--name", "x"], "name takes letters, digits, dots and hyphens, for a single --role"),
    (["--role", "drafter", "--name", "../x"], "name takes letters"),
    (["--role", "drafter", "--name", "ca"], "name takes letters"),
    (["--days", "0"], "'--days': 0 is not in the range"),
]


@pytest.mark.parametrize(("words", "reason"), WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_setting_writes_nothing(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        certs(tmp_path / "new", *words)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_authority_without_its_key_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certs(tmp_path)
    (tmp_path / "ca.key").unlink()
    before = (tmp_path / "ca.pem").read_bytes()
    with pytest.raises(SystemExit):
        certs(tmp_path)
    assert "if both are missing, another is made" in capsys.readouterr().err
    assert (tmp_path / "ca.pem").read_bytes() == before


def test_own_files_tell_an_expired_and_a_foreign_certificate(tmp_path: Path) -> None:
    site = Site(tmp_path)
    tls = site.issue("drafter", "d", hours=-1)
    assert "d.pem has expired (" in (tls.own_problem() or "")
    site.issue("drafter", "d", foreign=True)
    assert "has signed the certificate" in (tls.own_problem() or "")


def test_a_peer_is_known_by_the_uri_and_the_common_name() -> None:
    subject = ((("organizationName", "o"),), (("commonName", "cpu2"),))
    uri = ("URI", "outrider://role/trusted-drafter")
    named = {"subject": subject, "subjectAltName": (("DNS", "cpu2"), uri)}
    assert peer_of_ssl(named) == Peer(Role.TRUSTED_DRAFTER, "cpu2")
    assert peer_of_ssl({"subject": subject}) == Peer(Role.CLIENT, "cpu2")
    assert peer_of_ssl(None) == Peer(Role.CLIENT, "")
