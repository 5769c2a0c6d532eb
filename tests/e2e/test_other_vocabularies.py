"""Draft models with other tokenizers draft for the real target, and change no text."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from other_vocabularies import order_of, save_model
from stack import ROOT, TARGET, Client, Stack, prompt_texts, running

from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from outrider.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow  # It loads a target and three draft models.

PROMPTS = [encoding.ids for encoding in load_tokenizer(TARGET).encode_batch(prompt_texts())][::4]
PLAIN = SpeculationOptions(enabled=False)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "same seed": SamplingParams(0.8, seed=0x9E3779B97F4A7C15),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack with the bundled draft model and two with other vocabularies."""
    root = tmp_path_factory.mktemp("models")
    save_model(root / "permuted", order_of(1))
    save_model(root / "smaller", order_of(2, 0.3))
    stack = Stack()
    stack.add_drafter("bundled", "model")
    for name in ("permuted", "smaller"):
        stack.add_drafter(name, "model", "--model", str(root / name), "--target", TARGET)
    with running(stack):
        yield stack


async def drafted(
    stack: Stack, sampling: SamplingParams, options: SpeculationOptions
) -> tuple[list[list[int]], float]:
    """The texts of all prompts, and how many tokens a forward committed."""
    texts: list[list[int]] = []
    tokens = forwards = 0
    async with Client(stack.address) as client:
        for prompt in PROMPTS:
            request = TokenRequest(prompt, 48, sampling, speculation=options, ignore_eos=True)
            chunks = await client.generate(request)
            texts.append([token for chunk in chunks for token in chunk.token_ids])
            stats = chunks[-1].stats
            assert stats is not None
            tokens += len(texts[-1])
            forwards += stats.forward_count
    return texts, tokens / forwards


@pytest.mark.parametrize("kind", SAMPLINGS)
async def test_another_vocabulary_changes_no_text_and_its_drafts_are_accepted(
    others: Stack, kind: str
) -> None:
    sampling = SAMPLINGS[kind]
    expected, _ = await drafted(others, sampling, PLAIN)
    rates = {}
    for name in ("bundled", "permuted", "smaller"):
        options = SpeculationOptions(drafter_id=name, always_draft=True)
        texts, rates[name] = await drafted(others, sampling, options)
        assert texts == expected
    assert rates["permuted"] > 0.9 * rates["bundled"]
    # A part of the text is of tokens that this draft model lacks.
    assert rates["smaller"] > 1.2


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
