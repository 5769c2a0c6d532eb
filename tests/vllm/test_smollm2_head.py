"""vLLM's own code runs the head for SmolLM2; its drafts are as good as ours on each engine."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from outrider.gguf import pretrained
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from tests.smollm2_texts import Reference, answers, is_chat, smollm2, tokens_of
from tests.stack import ROOT, Client, Stack, running
from tests.vllm.conftest import FLAGS, START_S

pytestmark = pytest.mark.slow  # A model of 135 million parameters on both engines.

MODULE = "outrider_cli.verifier"
HEAD = str(ROOT / "models/smollm2/eagle3")
DRAFTS = 4
TOKENS = 64
WITH_VLLM = "tests.vllm.drafted_by_vllm"


def rounds_of_vllm(file: str, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Return the greedy texts that vLLM writes with the head, and how many drafts it verified."""
    done = subprocess.run(
        [sys.executable, "-m", WITH_VLLM, pretrained(file), HEAD, str(DRAFTS)],
        cwd=ROOT,
        input=json.dumps({"prompts": prompts, "tokens": TOKENS}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    return found["texts"], found["rounds"]


ENGINES = {"native": ("--max-sequences", "8"), "vllm": FLAGS}


@pytest.mark.parametrize("engine", ENGINES)
async def test_both_engines_accept_the_drafts_of_the_trained_head_that_vllm_accepts(
    engine: str,
) -> None:
    """The head's rounding may differ, so a few drafts may differ. The texts must be equal."""
    reference = Reference(smollm2())
    prompts = [prompt for index, prompt in enumerate(reference.prompts) if is_chat(index)]
    options = SpeculationOptions(always_draft=True, draft_tokens=DRAFTS)
    asked = [
        TokenRequest(prompt, TOKENS, SamplingParams(temperature=0.0), speculation=options)
        for prompt in prompts
    ]
    # The head is in the verifier's process, so on a busy machine its drafts are late less often
    # than the drafts of a head behind gRPC.
    flags = (*ENGINES[engine], "--in-process", f"head={HEAD}")
    with running(Stack(*flags, target=reference.file, module=MODULE), START_S) as stack:
        async with Client(stack.address) as client:
            found = await answers(client, asked)
    texts, rounds = rounds_of_vllm(reference.file, prompts)
    assert list(map(tokens_of, found)) == texts
    stats = [each for chunks in found if (each := chunks[-1].stats) is not None]
    drafts = sum(each.draft_count for each in stats)
    accepted = sum(each.accepted_token_count for each in stats)
    # The first token of a text has no draft.
    theirs = sum(len(text) - 1 for text in texts) / rounds
    ours = 1 + accepted / drafts
    print(f"tokens for each of vLLM's {rounds} drafts: {theirs:.3f}")
    print(f"tokens for each of our {drafts} drafts on {engine}: {ours:.3f}")
    assert theirs > 1.3
    # On a busy machine more than half of our drafts are late, and a mean over fewer drafts is less
    # exact. The number of accepted tokens of a draft has a standard deviation of 0.8; an untrained
    # head's number would be 0.
    assert abs(ours - theirs) <= 4 * 0.8 / math.sqrt(drafts)
    assert ours > 1.2
