"""The fingerprint of a tokenizer, which drafters in other languages compute from the contract."""

from pathlib import Path

from tokenizers import Tokenizer, models

from outrider.tokenizer import fingerprint

PROTOCOL = Path(__file__).parents[2] / "docs/protocol.md"


def test_the_contract_has_the_fingerprint_of_its_example() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    tokenizer.add_tokens(["é"])
    assert fingerprint(tokenizer) in PROTOCOL.read_text()
