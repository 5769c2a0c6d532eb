"""TLS settings are given together, and `outrider serve` gives each process its role's files."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from pydantic import ValidationError

from gateway.config import GatewaySettings
from outrider.process.network import rpc
from outrider.process.security import tls as tls_module
from outrider.process.security.tls import Tls, WatchedTls
from outrider.process.settings.config import parse
from outrider_cli.health import problem
from outrider_cli.serve_settings import ServeSettings
from outrider_cli.stack_plan import plan_stack
from tests.certificates import Site
from verifier_svc.config import VerifierSettings


def files(site: Site, kind: str) -> dict[str, Path]:
    tls = site.issue(kind)
    return {"tls_cert": tls.cert, "tls_key": tls.key, "tls_ca": site.ca}


def test_the_three_files_go_together(site: Site) -> None:
    given = files(site, "verifier")
    for name in given:
        rest = {other: path for other, path in given.items() if other != name}
        with pytest.raises(ValidationError, match=f"{name.replace('_', '-')} must be given too"):
            VerifierSettings(target="x", **rest)


def test_a_key_of_another_certificate_is_refused(site: Site) -> None:
    given = files(site, "verifier") | {"tls_key": site.issue("gateway").key}
    with pytest.raises(ValidationError, match=r"tls-key .*gateway.key does not belong to .*verif"):
        VerifierSettings(target="x", **given)


@pytest.mark.parametrize(
    "form", [serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL]
)
def test_an_encrypted_key_is_refused_without_asking_for_its_password(
    site: Site, form: serialization.PrivateFormat
) -> None:
    given = files(site, "verifier")
    key = serialization.load_pem_private_key(given["tls_key"].read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    given["tls_key"].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, locked))
    with pytest.raises(ValidationError, match=r"tls-key .*verifier.key is encrypted"):
        VerifierSettings(target="x", **given)
    tls = Tls(given["tls_cert"], given["tls_key"], None)
    with pytest.raises(ssl.SSLError):
        tls.load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


def test_a_file_without_certificates_is_refused(site: Site) -> None:
    given = files(site, "verifier") | {"tls_ca": site.issue("gateway").key}
    with pytest.raises(ValidationError, match=r"tls-ca .*gateway.key holds no PEM certificates"):
        VerifierSettings(target="x", **given)


def test_the_public_certificate_needs_its_key(site: Site) -> None:
    cert = site.issue("gateway").cert
    with pytest.raises(ValidationError, match="public-tls-key must be given too"):
        GatewaySettings(verifier=["a:1"], tokenizer="x", public_tls_cert=cert)
    with pytest.raises(ValidationError, match="public-tls-cert must be given too"):
        GatewaySettings(verifier=["a:1"], tokenizer="x", public_tls_ca=site.ca)


def test_bad_files_are_tried_and_logged_once_and_not_at_each_handshake(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Strangers can make handshakes, so each handshake must cost little and log nothing."""
    monkeypatch.setattr(tls_module, "_RETRY_S", 3600.0)
    mine = site.issue("verifier")
    loads: list[Tls] = []

    def load(files: Tls) -> bytes:
        loads.append(files)
        return files.read().key

    watched = WatchedTls(mine, load)
    mine.key.write_text("no key")
    assert not any(watched.refresh() for _ in range(50))
    assert len(loads) == 2
    assert len(caplog.records) == 1
    # A later change is seen at once.
    site.issue("verifier")
    assert watched.refresh()
    assert watched.current == mine.key.read_bytes()


def test_files_that_fit_later_without_a_trace_are_found(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the files' mode, for example, leaves no trace in the stamp of a file."""
    monkeypatch.setattr(tls_module, "_RETRY_S", 0.0)
    readable = True

    def load(files: Tls) -> bytes:
        if not readable:
            raise PermissionError
        return files.read().key

    watched = WatchedTls(site.issue("verifier"), load)
    readable = False
    site.issue("verifier")
    assert not watched.refresh()
    readable = True
    assert watched.refresh()


@pytest.mark.parametrize(("sampled", "role"), [(False, "drafter"), (True, "trusted-drafter")])
def test_serve_gives_each_process_the_files_of_its_role(
    site: Site, sampled: bool, role: str, tmp_path: Path
) -> None:
    for kind in ("verifier", "gateway", role):
        site.issue(kind)
    ports = {"http_port": 0, "grpc_port": 0, "verifier_port": 0}
    settings = ServeSettings(
        target="x",
        drafter=["ngram"],
        certs=site.folder,
        sampled_drafts=sampled,
        host="0.0.0.0",
        open=True,
        **ports,
    )
    stack = plan_stack(settings, tmp_path)
    for child, kind in zip(stack.children, ("verifier", role, "gateway"), strict=True):
        at = child.arguments.index("--tls-cert")
        assert child.arguments[at + 1 : at + 6 : 2] == [
            str(site.folder / name) for name in (f"{kind}.pem", f"{kind}.key", "ca.pem")
        ]
        assert ("--sampled-drafts" in child.arguments) is (sampled and kind == "verifier")
    assert "--public-tls-cert" in stack.children[-1].arguments
    assert stack.http_url.startswith("https://127.0.0.1:")
    assert stack.ca == site.ca


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.5", "gpu1"])
def test_a_verifier_beyond_loopback_needs_tls_or_open(site: Site, host: str) -> None:
    listen = f"{host}:50051"
    with pytest.raises(ValidationError, match=r"not a loopback address.* --tls-cert.* or --open"):
        VerifierSettings(target="x", listen=listen)
    VerifierSettings(target="x", listen=listen, open=True)
    VerifierSettings(target="x", listen=listen, published_on="127.0.0.1")
    VerifierSettings(target="x", listen=listen, **files(site, "verifier"))
    with pytest.raises(ValidationError, match=r"0\.0\.0\.0 is not a loopback address"):
        VerifierSettings(target="x", published_on="0.0.0.0")


def test_serve_exposes_its_verifier_only_with_certificates(site: Site, tmp_path: Path) -> None:
    for kind in ("verifier", "gateway", "drafter"):
        site.issue(kind)
    with pytest.raises(ValidationError, match="give --certs DIR"):
        ServeSettings(target="x", verifier_host="0.0.0.0")
    ports: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "verifier_port": 0}
    settings = ServeSettings(target="x", verifier_host="0.0.0.0", certs=site.folder, **ports)
    verifier, gateway = plan_stack(settings, tmp_path).children
    listen = parse(VerifierSettings, "verifier", verifier.arguments).listen
    assert listen.startswith("0.0.0.0:")
    # A certificate can name the loopback interface, but not all addresses.
    dialled = f"127.0.0.1:{listen.rpartition(':')[2]}"
    assert gateway.arguments[: gateway.arguments.index("--tokenizer")] == ["--verifier", dialled]


def test_serve_says_how_to_make_missing_certificates(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"tls-cert .*verifier.pem cannot be read: No such"):
        ServeSettings(target="x", certs=tmp_path)
    with pytest.raises(ValidationError, match=r"`outrider certs .*` makes the files"):
        ServeSettings(target="x", certs=tmp_path)


async def test_health_is_asked_over_tls_by_any_role(site: Site) -> None:
    server = rpc.Server("outrider.v1.VerifierService")
    socket = f"unix:{site.folder}/verifier.sock"
    [port, _] = await server.start("127.0.0.1:0", socket, tls=site.issue("verifier"))
    await server.set_serving(True)
    mine = site.issue("drafter")
    for address in (f"127.0.0.1:{port}", socket):
        ask = [address, "", mine.cert, mine.key, site.ca]
        assert await asyncio.to_thread(problem, *ask) is None
        refused = await asyncio.to_thread(problem, address, "")
        assert refused is not None
        assert "UNAVAILABLE" in refused
    await server.stop(0)
