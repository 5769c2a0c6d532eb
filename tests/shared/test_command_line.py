"""The `outrider` command reports errors in one line before anything starts, and completes words."""

import re
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from drafter_svc.config import settings_schema
from drafter_svc.families.registry import known_families
from gateway.config import GatewaySettings
from outrider import __version__
from outrider.process.settings.config import Settings
from outrider.process.settings.usage import invoke
from outrider_cli import serve as serving
from outrider_cli.main import app
from outrider_cli.serve_settings import ServeSettings
from outrider_cli.verifier import VerifierWithDraftersSettings

ROOT = Path(__file__).parents[2]
DTYPES = "'auto', 'float32', 'bfloat16' or 'float16'"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """Return the settings of the stacks that the command would have started."""
    settings: list[ServeSettings] = []

    def run(given: ServeSettings) -> int:
        settings.append(given)
        return 0

    monkeypatch.setattr(serving, "run", run)
    return settings


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--bogus 1", "there is no setting --bogus; outrider serve --help lists them"),
        (
            "--http_port 1",
            "there is no setting --http_port (did you mean --http-port?); "
            "outrider serve --help lists them",
        ),
        ("--dtype float8", f"dtype: must be {DTYPES}, not 'float8'"),
        ("--device gpu", "device: must be auto, cpu, cuda or cuda:N, not 'gpu'"),
        (
            "--threads two",
            "threads: must be a valid integer, unable to parse string as an integer, not 'two'",
        ),
        ("--target other", "target is given twice"),
        ("--config /nowhere", "config: /nowhere is not a file"),
        (
            "--host 0.0.0.0",
            "0.0.0.0 is not a loopback address, so anybody who reaches it could call the gateway: "
            "make keys with `outrider keys add FILE --tenant NAME` and give --keys-file FILE, or "
            "give --open to let everybody in",
        ),
        (
            "--open --keys-file k",
            "open means a gateway without keys, but keys are given; give one of them",
        ),
    ],
)
def test_an_error_in_a_setting_is_one_line(
    arguments: str, complaint: str, served: list[ServeSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        invoke(app, "outrider", ["serve", "models/target", *arguments.split()])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"outrider serve: {complaint}\n"
    assert not served


@pytest.mark.parametrize(
    "arguments",
    ["--target models/target --draft-tokens=auto", "--draft-tokens auto models/target"],
)
def test_the_target_needs_no_flag(arguments: str, served: list[ServeSettings]) -> None:
    assert invoke(app, "outrider", ["serve", *arguments.split()]) == 0
    assert [(settings.target, settings.draft_tokens) for settings in served] == [
        ("models/target", "auto")
    ]


@pytest.mark.parametrize(
    ("drafter", "complaint"),
    [
        ("ngram,bogus=1", "ngram has no setting bogus; it has cores, id, is_public_pool, "),
        (
            "ngram,max_draft_length=4",
            "ngram has no setting max_draft_length (did you mean max_draft_len?); it has ",
        ),
        ("ngram,branches=4", "ngram has no setting branches; it has "),
        (
            "ngram,max-draft-len=1000",
            "drafter ngram: max-draft-len: must be less than or equal to 64, not '1000'",
        ),
        (
            "model=m,threads=0",
            "drafter model: threads: must be greater than or equal to 1, not '0'",
        ),
        ("ngram,redis=redis://a", "redis needs --pool-secret-file FILE"),
    ],
)
def test_drafter_settings_are_checked_before_anything_starts(
    drafter: str, complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ports = [word for name in ("http", "grpc", "verifier") for word in (f"--{name}-port", "0")]
    assert invoke(app, "outrider", ["serve", "models/target", "--drafter", drafter, *ports]) == 2
    out, err = capfd.readouterr()
    assert err.startswith(f"outrider serve: {complaint}")
    assert err.count("\n") == 1
    assert out == ""


def test_a_port_in_use_is_named_with_its_flag(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert invoke(app, "outrider", ["serve", "models/target", "--http-port", port]) == 2
    complaint = f"--http-port: another process listens on 127.0.0.1:{port}; give another port"
    assert capfd.readouterr().err == f"outrider serve: {complaint}, or 0 for a free one\n"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("a: [1\n", "while parsing a flow sequence in"),
        ("- a\n- b\n", "must have one setting and its value a line, as in draft_tokens: auto"),
    ],
)
def test_the_error_names_a_file_without_settings(
    content: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    with pytest.raises(SystemExit):
        invoke(app, "outrider", ["serve", "models/target", "--config", str(file)])
    error = capsys.readouterr().err
    assert error.startswith(f"outrider serve: config: {file}")
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", ["version", "--version"])
def test_the_version_is_a_command_and_a_flag(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not invoke(app, "outrider", [arguments])
    assert capsys.readouterr().out.startswith(f"outrider {__version__}\ncommit: ")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("outrider se", "plain,serve"),
        ("outrider serve --dtype b", "plain,bfloat16"),
    ],
)
def test_a_shell_completes_commands_and_values(
    words: str, completed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    shell = BashComplete(app, {}, "outrider", "_OUTRIDER_COMPLETE")
    assert shell.complete().strip() == completed


@pytest.mark.parametrize(
    ("command", "title", "flag"),
    [
        ("serve", "Model", "--target TEXT"),
        ("gateway", "Addresses", "--http-host TEXT"),
        ("verifier", "Batches and memory", "--page-count INTEGER"),
        ("verifier", "Drafts", "--in-process TEXT"),
        ("drafter --family model", "Options", "--model TEXT"),
        ("drafter", "Mutual TLS between processes", "--tls-ca PATH"),
    ],
)
def test_help_shows_flags_in_groups(
    command: str, title: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        invoke(app, "outrider", [*command.split(), "--help"])
    groups = re.split(r"^(\S.*):$", capsys.readouterr().out, flags=re.MULTILINE)
    assert f"  {flag}" in groups[groups.index(title) + 1]


def test_help_marks_required_flags_and_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    invoke(app, "outrider", ["gateway", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--tokenizer TEXT [^-]*\[required\]", words)
    assert re.search(r"--http-port INTEGER [^-]*\[default: 8000\]", words)
    invoke(app, "outrider", ["keys", "add", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "--tenant TEXT Requests of one tenant share caches and n-grams. [required]" in words
    assert "[default: tenant]" in words


@pytest.mark.parametrize(
    "schema",
    [
        ServeSettings,
        GatewaySettings,
        VerifierWithDraftersSettings,
        *map(settings_schema, known_families()),
    ],
    ids=lambda schema: schema.__name__,
)
def test_every_group_begins_with_a_setting_of_its_class(schema: type[Settings]) -> None:
    for base in schema.__mro__:
        if groups := vars(base).get("groups"):
            assert set(groups) <= set(base.__annotations__)
