"""Commands, flags, targets and files that the documentation names exist."""

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

CLIENTS = {"backend", "base-url", "constraint", "custom-output-len", "data", "dataset-name"}
CLIENTS |= {"dataset-path", "endpoint", "ignore-eos", "max-concurrency", "model", "num-prompts"}
CLIENTS |= {"output", "profile", "random-input-len", "random-output-len", "skip-chat-template"}
CLIENTS |= {"scheduler-cls", "speculative-config", "temperature", "tokenizer"}
"""Flags of `vllm serve`, `vllm bench serve` and `guidellm run` that the pages name."""
DOCKERS = {"build", "detach", "force-recreate", "profile", "pull", "scale", "volumes"}
DOCKERS |= {"file", "network", "secret", "tag", "target"}
"""Flags of `docker compose` and `docker build` that the pages name."""
CI_UP = {"bases"}
"""Flags of `compose/ci-up.sh` that the pages name."""
CERTS = {"days", "name", "role"}
"""Flags of `outrider certs` that are not settings."""
EXPERIMENTS = {"only", "out", "validate", "with"}
"""Flags of `outrider lab bench`, `lab run` and `lab predict` that are not settings."""
SIMULATE = {"baseline", "faults", "out", "seed"}
"""Flags of `outrider lab simulate`."""
CHAOS = {"history", "kind", "minutes", "round", "seed", "tls"}
"""Flags of `outrider lab chaos` that are not settings."""
NUMACTL = {"cpunodebind", "hardware", "membind", "physcpubind"}
"""Flags of `numactl` that the pages name."""
CURLS = {"cacert", "data-binary", "protocol", "schema"}
"""Flags of `curl` and `buf curl` that the pages name."""
PIPS = {"deps"}
"""Flags of `pip` that the pages name, without "no-"."""
HUBS = {"local-dir"}
"""Flags of `hf download`."""


@cache
def setting_flags() -> frozenset[str]:
    """Return the flags of all settings, without their dashes."""
    files = [
        "verifier_svc/config.py",
        "drafter_svc/config.py",
        "examples/repeat_drafter.py",
        "gateway/config.py",
        "outrider_cli/serve_settings.py",
        "outrider_cli/verifier.py",
        "outrider/process/settings/config.py",
        "gateway/access/key_file.py",
        "outrider/process/security/tls.py",
        "outrider_bench/settings.py",
    ]
    paths = [ROOT / name for name in files] + sorted((ROOT / "drafter_svc/families").glob("*.py"))
    text = "\n".join(path.read_text() for path in paths)
    fields = re.findall(r"^    (\w+): ", text, re.MULTILINE)
    return frozenset(field.replace("_", "-") for field in fields)


@cache
def tracked_pages() -> list[Path]:
    """Return every page of the repository, also READMEs beside results."""
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
    # Flags of other programs; `grpc` and `ruby` are flags of protoc.
    others = {
        "days",
        "limit",
        # The scripts in models/ have these flags.
        "bfloat16",
        "chats",
        "service",
        "version",
        "grpc",
        "hidden-size",
        "ruby",
        "transcript",
    }
    ours = setting_flags() | others | CERTS | EXPERIMENTS | CHAOS | SIMULATE
    assert named <= ours | CLIENTS | DOCKERS | CI_UP | CURLS | NUMACTL | PIPS | HUBS


FLAGS = """
import io, json, re, sys
from contextlib import redirect_stdout, suppress
from importlib import import_module
from drafter_svc.families.settings import OF_FAMILIES
from outrider_cli.main import app, keys
from outrider.process.settings.usage import invoke

lines = {name: [[name]] for name in app.commands}
lines |= {f"keys {name}": [["keys", name]] for name in keys.commands}
lines["drafter"] = [["drafter", "--family", name] for name in OF_FAMILIES]
lines["drafter"] += [["drafter", "erase"]]
calls = {
    name: [lambda each=each: invoke(app, "outrider", [*each, "--help"]) for each in own]
    for name, own in lines.items()
}
for point in sys.argv[1].split():
    module = import_module(point)
    calls["lab " + point.rpartition(".")[2]] = [lambda module=module: module.main(["--help"])]
flags = {}
for name, own in calls.items():
    shown = io.StringIO()
    for call in own:
        with redirect_stdout(shown), suppress(SystemExit):
            call()
    flags[name] = sorted(set(re.findall(r"--[a-z][a-z0-9-]*", shown.getvalue())))
print(json.dumps(flags))
"""


def lab_modules() -> list[str]:
    """Return the modules of the commands of `outrider lab`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["outrider.commands"].values()
    return [point.partition(":")[0] for point in points]


@cache
def flags_by_command() -> dict[str, set[str]]:
    """Return the flags that each command's help names."""
    words = [sys.executable, "-c", FLAGS, " ".join(lab_modules())]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name: set(flags) for name, flags in json.loads(shown).items()}


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


HELP = """
import io, sys
from contextlib import redirect_stdout
from importlib import import_module
from drafter_svc.families.settings import OF_FAMILIES
from outrider_cli.main import app, keys
from outrider.process.settings.usage import invoke

lines = [[name] for name in app.commands] + [["keys", name] for name in keys.commands]
lines += [["drafter", "--family", name] for name in OF_FAMILIES]
calls = [lambda line=line: invoke(app, "outrider", [*line, "--help"]) for line in [[], *lines]]
calls += [lambda name=name: import_module(name).main(["--help"]) for name in sys.argv[1].split()]
heavy = set(sys.argv[2].split())
for call in calls:
    shown = io.StringIO()
    try:
        with redirect_stdout(shown):
            call()
    except SystemExit as ended:
        assert not ended.code
    first = shown.getvalue().partition(chr(10))[0]
    assert first.startswith("Usage: "), first
    if found := heavy & {name.partition(".")[0] for name in sys.modules}:
        sys.exit(f"{first}: loads {found}")
"""
HEAVY = (
    "fastapi grpc httpx jinja2 matplotlib numpy opentelemetry prometheus_client redis rich"
    " tokenizers torch transformers uvicorn"
)
"""Libraries that take longer to load than help may take to answer."""


def test_the_help_of_every_command_loads_no_large_library() -> None:
    """Without such libraries, help answers within half a second."""
    words = [sys.executable, "-c", HELP, " ".join(lab_modules()), HEAVY]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_only_the_owner_can_read_a_secret_that_a_page_makes(tmp_path: Path) -> None:
    text = (ROOT / "docs/operations.md").read_text()
    [line] = re.findall(r"^.*openssl rand.*$", text, re.MULTILINE)
    subprocess.run(["sh", "-c", f"umask 022\n{line}"], cwd=tmp_path, check=True)
    [made] = tmp_path.iterdir()
    assert made.stat().st_mode & 0o777 == 0o600
