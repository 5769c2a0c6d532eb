"""`--check-config` of each process checks settings and files, prints them, and starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import drafter_svc.__main__
import gateway.__main__
from gateway.config import GatewaySettings
from outrider.process.security.tls import Tls
from outrider.process.settings.check_config import _masked
from outrider.process.settings.config import load, parse
from outrider_cli import verifier
from outrider_cli.serve import run
from outrider_cli.serve_settings import ServeSettings
from outrider_cli.verifier import VerifierWithDraftersSettings
from tests.certificates import Site

ROOT = Path(__file__).parents[2]
TARGET = str(ROOT / "models/target")


def serve() -> None:
    raise SystemExit(run(parse(ServeSettings, "serve", sys.argv[1:])))


COMMANDS: dict[str, Callable[[], None]] = {
    "gateway": lambda: gateway.__main__.run(parse(GatewaySettings, "gateway", sys.argv[1:])),
    "verifier": lambda: verifier.run(parse(VerifierWithDraftersSettings, "verifier", sys.argv[1:])),
    "drafter": lambda: drafter_svc.__main__.main(sys.argv[1:]),
    "serve": serve,
}
GOOD = {
    "gateway": ["--verifier", "h:1", "--tokenizer", TARGET],
    "verifier": ["--target", TARGET],
    "drafter": ["--family", "model", "--model", TARGET],
    "serve": [TARGET, "--http-port", "0", "--grpc-port", "0", "--verifier-port", "0"],
}
BAD: list[tuple[str, list[str], str]] = [
    ("gateway", ["--keys-file", "none.yaml"], "keys-file none.yaml cannot be read"),
    ("gateway", ["--verifier", "h"], "verifier must be host:port or unix:/path, not 'h'"),
    ("gateway", ["--grpc-listen", "127.0.0.1:65536"], "grpc-listen must be host:port"),
    ("gateway", ["--tool-format", "nonsense"], "tool-format"),
    ("gateway", ["--tokenizer", "no-such-model"], "no directory no-such-model"),
    ("verifier", ["--target", "no-such-model"], "no directory no-such-model"),
    ("verifier", ["--feature-projection", "none"], "feature-projection none/config.json cannot"),
    ("verifier", ["--in-process", "head=none"], "in-process none/config.json cannot be read"),
    ("verifier", ["--in-process", "model=no-such-model"], "no directory no-such-model"),
    ("verifier", ["--engine", "vllm"], "the engine vllm needs vLLM, which is not installed"),
    ("drafter", ["--cores", "4000"], "cores must be among"),
    ("drafter", ["--model", "no-such-model"], "no directory no-such-model"),
    ("drafter", ["--weights", "int8", "--dtype", "float32"], "weights int8 computes in bfloat16,"),
    (
        "verifier",
        ["--in-process", f"model={TARGET},weights=int8", "--dtype", "float32"],
        "weights int8 computes in bfloat16, not in float32",
    ),
    ("serve", ["--drafter", "head=none"], "drafter none/config.json cannot be read"),
    ("serve", ["--drafter", "model=no-such-model"], "no directory no-such-model"),
]


def check(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Return the status of a command with these arguments."""
    monkeypatch.setattr(sys, "argv", [name, *GOOD[name], *arguments, "--check-config"])
    try:
        COMMANDS[name]()
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("name", COMMANDS)
def test_good_settings_are_printed_as_the_file_that_config_reads(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(name, ["--log-format", "json"], monkeypatch) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# ")
    shown = yaml.safe_load(printed)
    assert shown["log_format"] == "json"
    assert TARGET in shown.values()
    assert not {"config", "check_config"} & set(shown)


def test_weights_in_int8_pass_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check("drafter", ["--weights", "int8", "--device", "cpu"], monkeypatch) == 0


def test_what_is_printed_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("gateway", ["--verifier", "g:2", "--http-port", "7"], monkeypatch) == 0
    file = tmp_path / "gateway.yaml"
    file.write_text(capsys.readouterr().out)
    again = load(GatewaySettings, {"config": file})
    assert (again.verifier, again.http_port) == (["h:1", "g:2"], 7)


@pytest.mark.parametrize(("name", "arguments", "sentence"), BAD)
def test_a_wrong_setting_or_file_is_named_with_a_status(
    name: str,
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    status = check(name, arguments, monkeypatch)
    seen = capfd.readouterr()
    assert status not in (0, None)
    assert sentence in f"{status}{seen.err}"
    assert seen.out == ""


def test_passwords_and_keys_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = f'keys: [{{id: a, sha256: "{"0" * 64}", tenant: a}}]'
    assert check("gateway", ["--keys", keys], monkeypatch) == 0
    assert "0" * 64 not in capsys.readouterr().out
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    redis = ["--redis", "redis://me:secret@h:1/0", "--pool-secret-file", str(secret)]
    monkeypatch.setitem(GOOD, "drafter", ["--family", "ngram"])
    assert check("drafter", redis, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "me:secret" not in printed
    assert yaml.safe_load(printed)["redis"] == "redis://me:***@h:1/0"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:s3cret@h:1/0", "redis://me:***@h:1/0"),
        ("redis://:s3cret@h", "redis://:***@h"),
        ("redis://me:s3c:r3t@h", "redis://me:***@h"),
        ("redis://me:s3c@r3t@h", "redis://me:***@h"),
        ("redis://me:s3c/r3t@h", "redis://***"),
        ("redis://h?password=s3cret", "redis://h?***"),
        ("redis://h/0?db=1&pass%77ord=s3cret&x=y", "redis://h/0?***"),
        ("redis://h?password=s3c@r3t", "redis://***"),
        ("redis://me:s3cret@h:1,redis://me:s3cret@g:2", "redis://***"),
        ("rediss://me:s3cret@h:1?username=s3cret", "rediss://me:***@h:1?***"),
        ("rediss://outrider@redis:6379/0", "rediss://outrider@redis:6379/0"),
        ("https://s3cret@h/x", "https://***@h/x"),
        ("https://h/x#s3cret", "https://h/x#***"),
        ("dns:verifier:50051", "dns:verifier:50051"),
        (["http://me:s3cret@h", "http://h"], ["http://***:***@h", "http://h"]),
    ],
)
def test_no_part_of_a_url_that_may_be_a_secret_is_shown(url: Any, shown: Any) -> None:
    assert _masked(url) == shown


def flags(tls: Tls) -> list[str]:
    """Return the flags that give a process these files."""
    return [f"--tls-cert={tls.cert}", f"--tls-key={tls.key}", f"--tls-ca={tls.ca}"]


@pytest.mark.parametrize(
    ("name", "role"), [("gateway", "drafter"), ("verifier", "gateway"), ("drafter", "client")]
)
def test_a_certificate_of_another_role_is_refused(
    name: str, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = flags(Site(tmp_path).issue(role))
    assert f"{role}.pem has the role {role}, not {name}" in str(check(name, files, monkeypatch))


def test_an_expired_certificate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    files = flags(site.issue("verifier"))
    assert check("verifier", files, monkeypatch) == 0
    site.issue("verifier", hours=-1)
    assert "verifier.pem has expired" in str(check("verifier", files, monkeypatch))
