"""Every tracked file was written here: no foreign packages, no build output, nothing large."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_BYTES = 2**20
# The bundled pair of models, without which nothing runs.
LARGE = {"models/target/model.safetensors", "models/draft/model.safetensors"}
# Generated from protos/; CI generates them again and compares.
GENERATED = {"outrider/v1", "outrider/internal/v1"}
FOLDERS = {
    "node_modules",
    "site-packages",
    "vendor",
    "third_party",
    ".venv",
    "dist",
    "build",
    "gen",
    "target",
    "__pycache__",
}
# The folder of the bundled target model is not a build folder.
NAMED_ALIKE = ("models/target/",)
BUILT = re.compile(
    r"\.(o|a|so|dll|dylib|class|jar|war|exe|pyc|whl|egg|gem|tgz|zip|tar|gz|wasm|map)$|\.min\.(js|css)$"
)
PROTOBUF = re.compile(r"(_pb2?(_grpc)?\.(py|pyi|rb|js|ts|d\.ts)|\.pb\.(go|cc|h)|_services_pb\.rb)$")
LOCKS = re.compile(r"(^|/)(package-lock\.json|yarn\.lock|pnpm-lock\.yaml|Cargo\.lock|go\.sum)$")


@cache
def tracked() -> tuple[str, ...]:
    """Paths of all files in git's index, from the repository's root."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    paths = [path for path in listed.split("\0") if path and (ROOT / path).is_file()]
    return tuple(path for path in paths if not (ROOT / path).is_symlink())


def problem(path: str, size: int) -> str | None:
    """Why a file of `size` bytes does not belong in the repository; None if it does."""
    if size > MOST_BYTES and path not in LARGE:
        return f"has {size} bytes, more than {MOST_BYTES}"
    parents = path.rpartition("/")[0]
    if FOLDERS.intersection(parents.split("/")) and not path.startswith(NAMED_ALIKE):
        return "lies in a folder of packages or of build output"
    if BUILT.search(path):
        return "was built, or packed"
    if PROTOBUF.search(path) and parents not in GENERATED:
        return "was generated from a proto"
    if LOCKS.search(path):
        return "pins packages of others"
    return None


def test_every_tracked_file_was_written_here() -> None:
    assert len(tracked()) > 300
    found = {path: problem(path, (ROOT / path).stat().st_size) for path in tracked()}
    assert {path: reason for path, reason in found.items() if reason} == {}


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports tests by the files' names, without their folders."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    counts = Counter(name for name in names if name not in ("conftest.py", "__init__.py"))
    assert [name for name, count in counts.items() if count > 1] == []
