"""Draft models with other tokenizers draft for the real target, and change no text."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from outrider.protocol.messages import SamplingParams, SpeculationOptions
from tests.other_vocabularies import order_of, save_model
from tests.stack import ROOT, TARGET, Client, Stack, prompts, running

pytestmark = pytest.mark.slow  # It loads a target and three draft models.

PLAIN = SpeculationOptions(enabled=False)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "same seed": SamplingParams(0.8, seed=0x9E3779B97F4A7C15),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with the bundled draft model and two with other vocabularies, one of them trained."""
    permuted = tmp_path_factory.mktemp("models") / "permuted"
    save_model(permuted, order_of(1))
    stack = Stack()
    stack.add_drafter("bundled", "model")
    for name, path in {"permuted": permuted, "trained": ROOT / "models/draft-2048"}.items():
        stack.add_drafter(name, "model", "--model", str(path), "--target", TARGET)
    with running(stack):
        yield stack


@pytest.mark.parametrize("kind", SAMPLINGS)
async def test_another_vocabulary_changes_no_text_and_its_drafts_are_accepted(
    others: Stack, kind: str
) -> None:
    rates = {}
    async with Client(others.address) as client:
        expected = await client.answers(prompts(every=4), SAMPLINGS[kind], PLAIN)
        for name in ("bundled", "permuted", "trained"):
            options = SpeculationOptions(drafter_id=name, always_draft=True)
            found = await client.answers(prompts(every=4), SAMPLINGS[kind], options)
            assert found.texts == expected.texts
            rates[name] = sum(map(len, found.texts)) / found.forward_count
    assert rates["permuted"] > 0.9 * rates["bundled"]
    # A part of the text is of tokens that this draft model lacks.
    assert rates["trained"] > 0.6 * rates["bundled"]


def test_a_draft_model_without_the_target_is_refused_and_the_setting_is_named(
    others: Stack,
) -> None:
    permuted = others.drafters["permuted"].arguments
    without = [part for part in permuted if part not in ("--target", TARGET)]
    ended = subprocess.run(
        without, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "its setting target names the target" in ended.stderr
