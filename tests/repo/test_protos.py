"""Every declaration of the protos is documented, and the committed stubs are up to date."""

import re
from pathlib import Path

import pytest

from outrider.errors import Reason
from outrider.v1 import errors_pb2

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))
FIELD = r"(optional |repeated )?[\w.]+ \w+ = \d+;"
DECLARATION = re.compile(rf"^\s*(message|enum|service|rpc|oneof|{FIELD}|[A-Z_0-9]+ = \d+;)")


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_declaration_has_a_comment_above_it(path: Path) -> None:
    lines = path.read_text().splitlines()
    pairs = zip(["", *lines], lines, strict=False)
    declared = [(before, line) for before, line in pairs if DECLARATION.match(line)]
    assert [line for before, line in declared if "//" not in before] == []


ENTRY = re.compile(r"((?:  // .*\n)+)  ERROR_REASON_(\w+) =")
RULE = re.compile(r"([A-Z_]+)\. [A-Z].* Retry: (never|RetryInfo|backoff)\.")


def test_the_protos_list_every_error_with_its_status_and_retry_rule() -> None:
    text = (ROOT / "protos/outrider/v1/errors.proto").read_text()
    comments = {name: comment.replace("\n", "") for comment, name in ENTRY.findall(text)}
    rules = {name: RULE.fullmatch(comments[name].replace("  //", "")[1:]) for name in comments}
    listed = {name: rule.groups() for name, rule in rules.items() if rule}
    kinds = {reason.name: reason.kind for reason in Reason}
    assert listed == {name: (kind.status, kind.retry.value) for name, kind in kinds.items()}
    declared = errors_pb2.ErrorReason.keys()
    names = {name.removeprefix("ERROR_REASON_") for name in declared}
    assert names - {"UNSPECIFIED"} == set(Reason.__members__)
