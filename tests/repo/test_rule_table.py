"""docs/losslessness.md has the table of `rule_choice.py`, and every rule's name is known."""

import ast
import re
from pathlib import Path
from typing import get_args

from outrider.protocol.messages import AcceptanceRule, SampledRule

ROOT = Path(__file__).parents[2]
MARKUP = re.compile(r"`|\[|\]\([^)]*\)")


def rows(text: str) -> list[list[str]]:
    """Return the cells below the table's head, from "temperature 0" on, without markup."""
    table = text[text.index("| temperature 0 ") :].partition("\n\n")[0]
    return [
        [MARKUP.sub("", cell).strip().lower().replace("_", "-") for cell in line.split("|")]
        for line in table.splitlines()
    ]


def test_the_rule_table_in_code_and_in_the_documents_are_equal() -> None:
    code = (ROOT / "verifier_svc/verification/rule_choice.py").read_text()
    described = ast.get_docstring(ast.parse(code)) or ""
    page = (ROOT / "docs/losslessness.md").read_text()
    assert rows(page) == rows(described)
    assert len(rows(page)) == 7


def test_the_rules_for_sampled_drafts_are_exact_rules() -> None:
    by_label = {rule.label: rule for rule in AcceptanceRule}
    assert not [label for label in get_args(SampledRule) if by_label[label].lossy]


def test_a_rule_is_lossy_if_the_contract_says_so() -> None:
    proto = (ROOT / "protos/outrider/v1/common.proto").read_text()
    commented = re.findall(r"// ([^\n]+)\n(?:  //[^\n]*\n)*  ACCEPTANCE_RULE_(\w+) = [1-9]", proto)
    assert len(commented) == len(AcceptanceRule)
    for comment, name in commented:
        lossy = comment.startswith(("Lossy", "For benchmarks alone"))
        assert AcceptanceRule[name].lossy is lossy, name
