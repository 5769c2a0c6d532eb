"""The documentation names only commands, flags, targets and files that exist."""

import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = (
    "README.md",
    "CHANGELOG.md",
    "DECISIONS.md",
    "SECURITY.md",
    "bench/results/README.md",
    "compose/README.md",
    "models/README.md",
)
PAGES = [ROOT / name for name in NAMED] + sorted((ROOT / "docs").glob("*.md"))

OTHERS = {
    "vllm serve, vllm bench serve, guidellm": (
        "async-scheduling backend base-url constraint custom-output-len data dataset-name"
        " dataset-path endpoint ignore-eos max-concurrency model num-prompts output profile"
        " random-input-len random-output-len scheduler-cls skip-chat-template speculative-config"
        " temperature tokenizer"
    ),
    "docker": (
        "build detach file force-recreate format network profile pull scale secret tag target"
        " volumes"
    ),
    "compose/ci-up.sh": "bases versions",
    "numactl": "cpunodebind hardware membind physcpubind",
    "curl, buf curl": "cacert data-binary protocol schema",
    "pip, without no-": "deps",
    "hf download": "local-dir",
    "protoc": "grpc ruby",
    "the scripts in models/": "bfloat16 chats hidden-size service transcript vocab-size",
    "others": "limit",
}
"""Flags of other programs that the pages name."""


@cache
def tracked_pages() -> list[Path]:
    """Return every page of the repository, including READMEs beside results."""
    command = ["git", "ls-files", "-z", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / name for name in listed.split("\0") if (ROOT / name).is_file()]


def named(path: Path) -> str:
    """Return a page's path in the repository, as a test's name."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", tracked_pages(), ids=named)
def test_every_link_leads_to_a_file(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", tracked_pages(), ids=named)
def test_every_link_to_a_section_leads_to_a_heading(path: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*\.md)?#([^)]+)\)", path.read_text())
    pages = [(path.parent / file if file else path, anchor) for file, anchor in links]
    assert [(page.name, to) for page, to in pages if to not in anchors(page.read_text())] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_make_target_named_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", path.read_text(), re.MULTILINE))
    assert {target for pair in named for target in pair if target} <= targets


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_flag_on_a_page_belongs_to_a_command(path: Path) -> None:
    flags = re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", path.read_text())
    named = {flag.removeprefix("no-") for flag in flags} - {"help"}
    ours = {flag for flags in flags_by_command().values() for flag in flags}
    known = {flag.removeprefix("--").removeprefix("no-") for flag in ours}
    assert named <= known | set(" ".join(OTHERS.values()).split())


HELP = """
import io, json, re, sys
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from drafter_svc.families.settings import OF_FAMILIES
from outrider_cli.main import app, keys
from outrider.process.settings.usage import invoke

def ask(*words):
    invoke(app, "outrider", [*words, "--help"])

calls = [(" ".join(line), partial(ask, *line)) for line in [[], *([name] for name in app.commands)]]
calls += [(f"keys {name}", partial(ask, "keys", name)) for name in keys.commands]
calls += [("drafter", partial(ask, "drafter", "--family", name)) for name in OF_FAMILIES]
for point in sys.argv[1].split():
    call = lambda point=point: import_module(point).main(["--help"])
    calls.append(("lab " + point.rpartition(".")[2], call))
# These two load the drafter library.
calls += [("drafter", partial(ask, "drafter", *words.split()))
          for words in ("erase", "--family examples.repeat_drafter:RepeatFamily")]
flags = {}
heavy = set(sys.argv[2].split())
for name, call in calls:
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            call()
    except SystemExit as ended:
        assert not ended.code
    text = shown.getvalue()
    assert text.startswith("Usage: "), text
    flags.setdefault(name, []).extend(re.findall(r"--[a-z][a-z0-9-]*", text))
    found = heavy & {module.partition(".")[0] for module in sys.modules}
    if found and call not in [each for _, each in calls[-2:]]:
        sys.exit(f"the help of {name} loads {found}")
print(json.dumps(flags))
"""
HEAVY = (
    "fastapi grpc httpx jinja2 matplotlib numpy opentelemetry prometheus_client redis rich"
    " tokenizers torch transformers uvicorn"
)
"""Libraries that take longer to load than the half second in which help must answer."""


def lab_modules() -> list[str]:
    """Return the modules of the commands of `outrider lab`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["outrider.commands"].values()
    return [point.partition(":")[0] for point in points]


@cache
def flags_by_command() -> dict[str, set[str]]:
    """Return the flags that each command's help names, after checking what the help loads."""
    words = [sys.executable, "-c", HELP, " ".join(lab_modules()), HEAVY]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return {name: set(flags) for name, flags in json.loads(ended.stdout).items()}


def test_the_help_of_every_command_loads_no_large_library() -> None:
    assert len(flags_by_command()) > 15


def shown_commands(page: str) -> list[list[str]]:
    """Return the words after `outrider` of each command in a page's blocks of shell."""
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        for part in re.split(r"&&|\||;|\$\(", line):
            words = re.sub(r"(^|\s)#.*", "", part).split()
            starts = [i for i, word in enumerate(words) if re.fullmatch(r"(\S*/)?outrider", word)]
            if starts:
                found.append(words[starts[0] + 1 :])
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_that_a_page_shows_takes_its_flags(path: Path) -> None:
    for words in shown_commands(path.read_text()):
        name = " ".join(words[: 2 if words[:1] in (["lab"], ["keys"]) else 1])
        flags = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        # A family of another package has further flags.
        if name in flags_by_command() and not any("." in word and ":" in word for word in words):
            unknown = flags - flags_by_command()[name] - {"--help"}
            assert not unknown, f"{' '.join(words)}: {name} has no {unknown}"


def test_only_the_owner_can_read_a_secret_that_a_page_makes(tmp_path: Path) -> None:
    text = (ROOT / "docs/operations.md").read_text()
    [line] = re.findall(r"^.*openssl rand.*$", text, re.MULTILINE)
    subprocess.run(["sh", "-c", f"umask 022\n{line}"], cwd=tmp_path, check=True)
    [made] = tmp_path.iterdir()
    assert made.stat().st_mode & 0o777 == 0o600
