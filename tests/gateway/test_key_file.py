"""The gateway checks its key file at start; without keys it serves other hosts only if `open`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gateway.access.key_file import key_digest, read_keys, write_keys
from gateway.access.keys import KeyRing
from gateway.config import GatewaySettings
from outrider.errors import OutriderError
from tests.gateway.keyed_rig import ALICE, BOB, entry


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "valid dictionary"),
        ("", "keys: Field required"),
        ("keys: [{id: a, tenant: t, sha256: abc}]", "keys.0.sha256"),
        ("keys: [{id: a, tenant: t, sha256: {h}, colour: red}]", "keys.0.colour"),
        ("keys: [{id: a, tenant: t, sha256: {h}}, {id: a, tenant: t, sha256: {g}}]", "the id a"),
        ("keys: [{id: a, tenant: t, sha256: {h}}, {id: b, tenant: t, sha256: {h}}]", "sha256"),
        (
            "keys: [{id: a, tenant: t, sha256: {h}, concurrent_sequences: 0}]",
            "concurrent_sequences",
        ),
        ("keys: [{id: a, tenant: t, sha256: {h}, expires: 2026-01-01T00:00:00}]", "expires"),
        ("keys: [{id: a, tenant: t, sha256: {h}, expires: 2026-02-30}]", "a value in it"),
        ("{", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_with_the_place_and_the_problem(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text.replace("{h}", "a" * 64).replace("{g}", "b" * 64))
    with pytest.raises(OutriderError) as caught:
        read_keys(path)
    assert says in caught.value.message
    assert str(path) in caught.value.message


def test_a_new_file_of_keys_is_its_owners_and_keeps_a_chosen_mode(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    write_keys(path, [entry(ALICE, "alice")])
    assert path.stat().st_mode & 0o777 == 0o600
    assert ALICE not in path.read_text()
    path.chmod(0o640)
    write_keys(path, [entry(BOB, "bob")])
    assert path.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["keys.yaml"]


def test_a_file_that_root_writes_keeps_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.yaml"
    write_keys(path, [entry(ALICE, "alice")])
    owned, given = path.stat(), list[tuple[int, int]]()
    as_root = os.stat_result((*owned[:4], owned.st_uid + 1, owned.st_gid + 2, *owned[6:]))
    monkeypatch.setattr(os, "fstat", lambda file: as_root)
    monkeypatch.setattr(os, "fchown", lambda file, user, group: given.append((user, group)))
    write_keys(path, [])
    assert given == [(owned.st_uid, owned.st_gid)]


def test_a_broken_file_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys: a\n{ALICE}: [b: c: d]")
    with pytest.raises(OutriderError, match=r"but got ':', in line 2, column \d+$") as caught:
        read_keys(path)
    assert ALICE not in caught.value.message


@pytest.mark.parametrize(("key", "tenant"), [(ALICE, "bob"), (BOB, "alice")], ids=["key", "id"])
def test_the_keys_of_file_and_setting_must_differ(tmp_path: Path, key: str, tenant: str) -> None:
    path = tmp_path / "keys.yaml"
    write_keys(path, [entry(ALICE, "alice")])
    text = f"keys: [{{id: {tenant}, tenant: t, sha256: {key_digest(key)}}}]"
    with pytest.raises(OutriderError, match=r"contradicts the keys of .*: 2 keys have the"):
        KeyRing(path, text)


EXPOSED = [
    ({"http_host": "0.0.0.0"}, "0.0.0.0"),
    ({"http_host": "::"}, "::"),
    ({"http_host": "gpu7.lan"}, "gpu7.lan"),
    ({"grpc_listen": "0.0.0.0:8001"}, "0.0.0.0"),
    ({"grpc_listen": "[::]:8001"}, "::"),
]


@pytest.mark.parametrize(("given", "named"), EXPOSED)
def test_without_keys_only_loopback_is_listened_on_unless_open(
    given: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match="is not a loopback address") as caught:
        GatewaySettings(verifier=["v:1"], tokenizer="t", **given)
    for said in (f"{named} is not", "outrider keys add", "--keys-file", "--open"):
        assert said in str(caught.value)
    GatewaySettings(verifier=["v:1"], tokenizer="t", open=True, **given)
    GatewaySettings(verifier=["v:1"], tokenizer="t", keys_file=Path("k"), **given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"http_host": "localhost"},
        {"http_host": "127.9.9.9"},
        {"http_host": "::1"},
        {"grpc_listen": "unix:/run/outrider.sock"},
    ],
)
def test_a_gateway_on_loopback_needs_neither_keys_nor_open(given: dict[str, Any]) -> None:
    GatewaySettings(verifier=["v:1"], tokenizer="t", **given)


def test_open_contradicts_keys_and_client_certificates() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        GatewaySettings(verifier=["v:1"], tokenizer="t", open=True, keys_file=Path("k"))
    with pytest.raises(ValueError, match="public-tls-ca asks clients for certificates; give one"):
        GatewaySettings(verifier=["v:1"], tokenizer="t", open=True, public_tls_ca=Path("ca"))


class Incomparable(str):
    """A key that raises an error when it is compared with anything."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a comparison's time tells how much of a guess is right")


def test_only_hashes_of_keys_are_compared_and_in_constant_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compared: list[tuple[str, str]] = []

    def record(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("gateway.access.keys.hmac.compare_digest", record)
    path = tmp_path / "keys.yaml"
    write_keys(path, [entry(ALICE, "alice"), entry(BOB, "bob")])
    ring = KeyRing(path, "")
    found = ring.find(Incomparable(ALICE))
    assert found is not None
    assert found.tenant == "alice"
    assert compared == [(key_digest(ALICE), key_digest(ALICE))]
    assert ring.find(Incomparable(ALICE[:-1])) is None
