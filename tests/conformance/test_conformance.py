"""The conformance kit passes correct drafters and finds each fault under the rule it breaks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from outrider.conformance.kit import Kit
from outrider.conformance.report import table
from outrider.conformance.rules import RULES, Outcome, Result
from outrider.conformance.stage import NO_ANSWER
from outrider.tokenizer import fingerprint, load_tokenizer

ROOT = Path(__file__).parents[2]
FAULTY = [sys.executable, str(Path(__file__).with_name("faulty_drafter.py")), "{address}"]
FAULTS: dict[str, set[str]] = {
    "does-not-wait": {"waits-until-ready"},
    "wrong-fingerprint": {"hello"},
    "base-too-large": {"valid-base"},
    "ids-too-large": {"valid-tokens"},
    "parents-behind": {"valid-parents"},
    "confidences-of-zero": {"valid-confidences"},
    "forgets-closed": {"knows-its-sequences"},
    # This drafter fails to answer in several scenes.
    "never-skips": {
        "answers-verdicts",
        "many-at-once",
        "repeated-verdicts",
        "serves-while-draining",
    },
    "never-falls-silent": {"falls-silent"},
    "appends-all": {"repeated-verdicts", "valid-base"},
    "dies-of-unknown-values": {"unknown-values"},
    "dies-of-unknown-messages": {"unknown-messages"},
    "prediction-as-corpus": {"predictions"},
    "ignores-retry-info": {"honours-retry-info"},
    "never-comes-back": {"comes-back"},
    "leaves-at-once": {"leaves-politely"},
    "never-gives-up": {"gives-up"},
    "gives-up-for-known-reasons-only": {"gives-up"},
    "parents-from-0": {"trees"},
    "branches-too-deep": {"trees"},
    "negative-durations": {"valid-durations"},
    "drops-when-idle": {"keeps-the-stream"},
    "asks-for-no-state": {"hello"},
    "dies-of-gaps": {"features"},
}
# Faults that break no rule, each with the kit's note about it.
USELESS: dict[str, set[str]] = {
    "useless-guesses": {"useless-guesses"},
    "beyond-the-window": {"beyond-the-window"},
    "implausible-durations": {"implausible-durations"},
    "short-without-skip": {"no-skip"},
}


FAMILIES = ["ngram", "examples.repeat_drafter:RepeatFamily"]
# Without its package (`make suffix`), the family suffix cannot start.
if find_spec("arctic_inference") is not None:
    FAMILIES.append("suffix")
CORRECT = {
    family: [sys.executable, "-m", "drafter_svc", "--family", family, "--verifier", "{address}"]
    for family in FAMILIES
} | {"the example": [sys.executable, "examples/ngram_drafter.py", "{address}"]}


def played(commands: Iterable[list[str]], tokenizer: str = "") -> list[Kit]:
    """Return kits that have played all scenes.

    Six kits play at a time, since a scene mostly waits.
    """
    hash_of_ids = fingerprint(load_tokenizer(tokenizer)) if tokenizer else "f" * 64
    kits = [Kit(command, hash_of_ids, 4096) for command in commands]

    async def play() -> None:
        places = asyncio.Semaphore(6)

        async def one(kit: Kit) -> None:
            async with places:
                await kit.run()

        await asyncio.gather(*map(one, kits))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.chdir(ROOT)
        asyncio.run(play())
    return kits


def reasons(kit: Kit) -> dict[str, str]:
    """Map a rule's name to the way in which it was broken."""
    return {name: kit.results[name].reason for name in kit.failed}


def test_a_correct_drafter_passes() -> None:
    [kit] = played([FAULTY])
    assert (reasons(kit), kit.notes) == ({}, {})
    seen = {name for name, result in kit.results.items() if result.outcome is Outcome.PASS}
    assert set(kit.results) - seen == {"predictions"}


@pytest.mark.slow
def test_each_fault_is_found_at_its_rule() -> None:
    kits = dict(zip(FAULTS, played([*FAULTY, fault] for fault in FAULTS), strict=True))
    wrong = {name: reasons(kit) for name, kit in kits.items() if set(kit.failed) != FAULTS[name]}
    assert wrong == {}


@pytest.mark.slow
def test_what_is_of_no_use_is_noted_and_breaks_no_rule() -> None:
    kits = dict(zip(USELESS, played([*FAULTY, fault] for fault in USELESS), strict=True))
    assert {name: reasons(kit) for name, kit in kits.items() if kit.failed} == {}
    assert {name: set(kit.notes) for name, kit in kits.items()} == USELESS


def test_a_rule_broken_for_want_of_a_skip_has_the_hint_about_answers() -> None:
    kit = Kit(FAULTY, "f" * 64, 4096)
    for rule in ("answers-verdicts", "large-numbers"):
        kit.results[rule] = Result(Outcome.FAIL, f"{NO_ANSWER}, at length 24")
    console = Console(width=200)
    with console.capture() as shown:
        console.print(table(kit.results, kit.notes))
    assert RULES["answers-verdicts"].mend in shown.get()
    assert RULES["large-numbers"].mend not in shown.get()


@pytest.mark.slow
def test_each_family_and_the_example_pass() -> None:
    kits = dict(zip(CORRECT, played(CORRECT.values()), strict=True))
    assert {name: reasons(kit) for name, kit in kits.items() if kit.failed} == {}
    with_trees = {name for name in kits if kits[name].results["trees"].outcome is Outcome.PASS}
    assert with_trees == {"ngram", "suffix"} & set(FAMILIES)


OF_THE_TARGET = {
    "model": ["--model", "models/draft", "--dtype", "float32", "--threads", "1"],
    "grammar": ["--target", "models/target"],
}


@pytest.mark.slow
@pytest.mark.parametrize("family", OF_THE_TARGET)
def test_a_family_that_needs_the_targets_tokens_passes(family: str) -> None:
    command = [sys.executable, "-m", "drafter_svc", "--family", family, *OF_THE_TARGET[family]]
    [kit] = played([[*command, "--verifier", "{address}"]], "models/target")
    assert reasons(kit) == {}
