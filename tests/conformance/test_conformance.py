"""The conformance kit passes correct drafters and finds each fault under the rule it breaks."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from stack import Stack, running  # lies in tests/e2e

from outrider.conformance.kit import Kit
from outrider.conformance.rules import Outcome
from outrider.conformance.verifier_side import RULES as RULES_OF_VERIFIERS
from outrider.conformance.verifier_side import VerifierCheck
from outrider.process import rpc
from outrider.tokenizer import fingerprint, load_tokenizer
from outrider.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server

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
    # It fails to answer in several scenes.
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
}


def played(command: list[str], monkeypatch: pytest.MonkeyPatch, tokenizer: str = "") -> Kit:
    """A kit that has played all scenes."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(ROOT)
    hash_of_ids = fingerprint(load_tokenizer(tokenizer)) if tokenizer else "f" * 64
    kit = Kit(command, hash_of_ids, 4096)
    asyncio.run(kit.run())
    return kit


def test_a_correct_drafter_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = played(FAULTY, monkeypatch)
    assert [(name, kit.results[name].reason) for name in kit.failed] == []
    seen = {name for name, result in kit.results.items() if result.outcome is Outcome.PASS}
    assert set(kit.results) - seen == {"predictions"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_at_its_rule(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = played([*FAULTY, fault], monkeypatch)
    assert set(kit.failed) == FAULTS[fault], {name: kit.results[name].reason for name in kit.failed}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ngram", "suffix", "examples.repeat_drafter:RepeatFamily"])
def test_each_family_passes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "drafter_svc", "--family", family, "--verifier", "{address}"]
    kit = played(command, monkeypatch)
    assert [(name, kit.results[name].reason) for name in kit.failed] == []


@pytest.mark.slow
def test_the_draft_model_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ["--family", "model", "--model", "models/draft", "--dtype", "float32", "--threads", "1"]
    command = [sys.executable, "-m", "drafter_svc", *model, "--verifier", "{address}"]
    kit = played(command, monkeypatch, "models/target")
    assert [(name, kit.results[name].reason) for name in kit.failed] == []


@pytest.mark.slow
def test_the_example_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = played([sys.executable, "examples/ngram_drafter.py", "{address}"], monkeypatch)
    assert [(name, kit.results[name].reason) for name in kit.failed] == []


@pytest.mark.slow
def test_the_verifier_passes() -> None:
    # Without --always-draft the verifier opens no sequences to a drafter whose drafts do not pay.
    with running(Stack("--always-draft")) as stack:
        check = VerifierCheck(stack.address)
        asyncio.run(check.run())
    assert check.results == dict.fromkeys(RULES_OF_VERIFIERS)


async def test_a_verifier_without_tokens_fails() -> None:
    server = rpc.Server("outrider.v1.VerifierService")
    silent = Kit(FAULTY, "f" * 64, 4096).verifier
    add_VerifierServiceServicer_to_server(silent, server.grpc)
    [port] = await server.start("127.0.0.1:0")
    try:
        check = VerifierCheck(f"127.0.0.1:{port}")
        await check.run()
    finally:
        await server.stop(0)
    assert check.results["model"] is not None
