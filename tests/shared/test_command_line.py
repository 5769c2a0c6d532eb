"""The `outrider` command reports errors in one line before anything starts, and completes words."""

from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from outrider import __version__
from outrider.launch import serve as serving
from outrider.launch.cli import app
from outrider.launch.serve_settings import ServeSettings
from outrider.process.usage import invoke

ROOT = Path(__file__).parents[2]
DTYPES = "'auto', 'float32', 'bfloat16' or 'float16'"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """The settings of the stacks that the command would have started."""
    settings: list[ServeSettings] = []
    monkeypatch.setattr(serving, "run", lambda given: settings.append(given) or 0)
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
    assert capsys.readouterr().out == f"{__version__}\n"


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
