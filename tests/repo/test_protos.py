"""The contract is documented to the last field, and the committed stubs are what it generates."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos/outrider/v1").glob("*.proto"))
DECLARATION = re.compile(r"^\s*(message|enum|service|rpc|oneof|(optional |repeated )?[\w.]+ \w+ = \d+;|[A-Z_0-9]+ = \d+;)")


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_declaration_has_a_comment_above_it(path: Path) -> None:
    lines = path.read_text().splitlines()
    pairs = zip(["", *lines], lines, strict=False)
    assert [line.strip() for before, line in pairs if DECLARATION.match(line) and "//" not in before] == []


def test_the_committed_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    (tmp_path / "outrider/v1").mkdir(parents=True)
    command = ["bash", str(ROOT / "protos/generate.sh"), str(tmp_path)]
    subprocess.run(command, check=True, env={"PYTHON": sys.executable, "PATH": "/usr/local/bin:/usr/bin:/bin"})
    made = {path.name: path.read_text() for path in (tmp_path / "outrider/v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "outrider/v1").glob("*_pb2*")}
    assert made == committed
