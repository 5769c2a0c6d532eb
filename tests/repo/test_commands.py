"""What the README and the documentation tell a reader to run or to open exists."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = (
    "README.md",
    "CHANGELOG.md",
    "DECISIONS.md",
    "clients/browser/README.md",
    "compose/README.md",
    "models/README.md",
)
PAGES = [ROOT / name for name in NAMED] + sorted((ROOT / "docs").glob("*.md"))
FILES = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.splitlines()

CLIENTS = {
    *(
        "backend",
        "base-url",
        "constraint",
        "custom-output-len",
        "data",
        "dataset-name",
        "dataset-path",
        "endpoint",
        "ignore-eos",
    ),
    *(
        "max-concurrency",
        "model",
        "num-prompts",
        "output",
        "profile",
        "random-input-len",
        "random-output-len",
    ),
    *("skip-chat-template", "temperature", "tokenizer"),
}
"""Flags of `vllm bench serve` and `guidellm run` that the pages name."""
DOCKERS = {"build", "detach", "force-recreate", "profile", "pull", "scale", "volumes"}
"""Flags of `docker compose` that the pages name."""
EXPERIMENTS = {"json", "validate"}
"""Flags of `outrider advise` and `outrider experiment predict` that are no settings."""
CURLS = {"data-binary", "list-services", "protocol", "schema"}
"""Flags of `curl` and `buf curl` that the pages name."""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_make_target_named_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", path.read_text(), re.MULTILINE))
    assert {target for pair in named for target in pair if target} <= targets


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_flag_on_a_page_belongs_to_a_command(path: Path) -> None:
    fields = {
        field.rstrip("_").replace("_", "-")
        for name in (
            "verifier_svc/config.py",
            "drafter_svc/config.py",
            *(str(path.relative_to(ROOT)) for path in (ROOT / "drafter_svc/families").glob("*.py")),
            "examples/repeat_drafter.py",
            "gateway/config.py",
            "outrider/launch/stack.py",
            "bench/__main__.py",
            *(f"bench/experiment/{name}.py" for name in ("advise", "agent", "profile", "run")),
            "bench/simulator/scenario.py",
        )
        for field in re.findall(
            r"^    (\w+): ",
            (ROOT / name).read_text() + (ROOT / "outrider/process/config.py").read_text(),
            re.MULTILINE,
        )
    }
    named = {
        flag.removeprefix("no-")
        for flag in re.findall(r"(?<![\w-])--([a-z][a-z-]+)", path.read_text())
    } - {"help"}
    # What protoc names begins with the language.
    others = {"models", "max-tokens", "service", "timeout", "version", "grpc", "ruby", "transcript"}
    others |= {"compare", "out", "rates", "processes"}  # of `outrider fleet`
    assert named <= fields | others | EXPERIMENTS | CLIENTS | DOCKERS | CURLS


def test_the_readme_opens_with_the_three_commands() -> None:
    commands = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["demo", "test", "serve"]


def test_no_python_file_is_too_long() -> None:
    long = [name for name in FILES if name.endswith(".py") and "_pb2" not in name]
    assert [name for name in long if len((ROOT / name).read_text().splitlines()) > 450] == []
