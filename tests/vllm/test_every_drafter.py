"""On both runners of vLLM, no drafter changes a text: neither vLLM's own, nor any of ours.

Beside vLLM's EAGLE-3 head stand an n-gram drafter, a draft model of another vocabulary, a suffix
drafter, and drafters that speak the protocol over a socket, as one in another language does.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import pytest

from outrider.protocol.messages import (
    SamplingParams,
    SpeculationOptions,
    TokenRequest,
    TokenSource,
)
from tests.e2e.test_greedy_equality import Reference
from tests.stack import ROOT, TARGET, Client, Process, Stack, running
from tests.vllm.conftest import FLAGS, HEAD, START_S
from tests.vllm.test_vllm_engine import drafting, wrong

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "OUTRIDER_INTERPRET_VLLM" not in os.environ,
        reason="Triton's interpreter takes ten minutes; set OUTRIDER_INTERPRET_VLLM to run it",
    ),
]

# The suffix family's package is in the environment of `make`. Its drafter dials from there.
PYTHON = ROOT / ".venv/bin/python"


@dataclass
class Size:
    """How much a runner writes in a test."""

    module: str
    prompts: range
    tokens: int


SIZES = {
    "v1": Size("verifier_svc", range(0, 40, 5), 40),
    "v2": Size("tests.vllm.on_second_runner", range(0, 40, 13), 12),
}


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> Size:
    return SIZES[request.param]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def has_suffixes() -> bool:
    """Return whether `make suffix` has run."""
    if not PYTHON.exists():
        return False
    done = subprocess.run([PYTHON, "-c", "import arctic_inference"], capture_output=True)
    return done.returncode == 0


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a copy of the bundled head whose config.json names its layers at the top level.

    vLLM's second runner does not look into `eagle_config`.
    """
    copied = tmp_path_factory.mktemp("head")
    shutil.copytree(HEAD, copied, dirs_exist_ok=True)
    config = json.loads((copied / "config.json").read_text())
    name = "eagle_aux_hidden_state_layer_ids"
    (copied / "config.json").write_text(json.dumps(config | {name: config["eagle_config"][name]}))
    return str(copied)


@pytest.fixture(scope="module")
def stack(size: Size, head: str) -> Iterator[Stack]:
    """Yield a verifier with vLLM's head, and our drafters."""
    own_drafter = {"method": "eagle3", "model": head, "num_speculative_tokens": 4}
    own = f"speculative_config={json.dumps(own_drafter)}"
    few = [flag if flag != "16" else "4" for flag in FLAGS]
    stack = Stack(*few, "--engine-arg", own, module=size.module)
    stack.add_drafter("ngram", "ngram")
    draft = str(ROOT / "models/draft-2048")
    stack.add_drafter("model", "model", "--model", draft, "--target", TARGET)
    if has_suffixes():
        flags = ["--family", "suffix", "--verifier", stack.address, "--id", "suffix"]
        command = [str(PYTHON), "-m", "drafter_svc", *flags]
        stack.drafters["suffix"] = Process("", command=command)
    with running(stack, 2 * START_S):
        yield stack


def request(prompt: list[int], size: Size, name: str, seed: int | None = None) -> TokenRequest:
    """Return a greedy request or, with a seed, a sampled request.

    `name` is a drafter's id. If it is empty, all drafters draft; if it is "none", no drafter does.
    """
    options = SpeculationOptions(drafter_id=name, always_draft=True)
    if name == "none":
        options = SpeculationOptions(enabled=False)
    sampling = SamplingParams(temperature=0.0 if seed is None else 0.8, seed=seed)
    return TokenRequest(prompt, size.tokens, sampling, speculation=options)


async def write(client: Client, asked: list[TokenRequest]) -> tuple[list[list[int]], Counter[str]]:
    """Return the texts, and the number of accepted draft tokens of each drafter."""
    found = await asyncio.gather(*(client.generate(each) for each in asked))
    accepted: Counter[str] = Counter()
    for chunk in chain.from_iterable(found):
        accepted[chunk.drafter_id] += chunk.sources.count(TokenSource.ACCEPTED)
    return [[token for chunk in chunks for token in chunk.token_ids] for chunks in found], accepted


@pytest.mark.parametrize("name", ["none", "vllm", "ngram", "model", "suffix", ""])
async def test_greedy_texts_are_those_of_transformers(
    stack: Stack, size: Size, reference: Reference, name: str
) -> None:
    """A request may name vLLM's own drafter like any other; without a name, all draft."""
    if name == "suffix" and "suffix" not in stack.drafters:
        pytest.skip("make suffix has not run")
    async with Client(stack.address) as client:
        asked = [request(reference.prompts[i], size, name) for i in size.prompts]
        found, accepted = await write(client, asked)
    print(name or "all", dict(accepted))
    for index, tokens in zip(size.prompts, found, strict=True):
        assert tokens == reference.generate(index)[: len(tokens)]
    if name == "none":
        assert not accepted.total()
    elif name in ("vllm", "model"):
        assert accepted[name] == accepted.total() > 0
    elif size.module == "verifier_svc":
        # In the second runner's short texts, an n-gram drafter may find nothing.
        assert accepted.total() > 0


async def test_a_seed_gives_one_text_with_any_drafter(
    stack: Stack, size: Size, native: Stack, reference: Reference
) -> None:
    async with Client(native.address) as client:
        asked = [request(reference.prompts[i], size, "none", i) for i in size.prompts]
        wanted, _ = await write(client, asked)
    async with Client(stack.address) as client:
        for name in ("none", "vllm", ""):
            asked = [request(reference.prompts[i], size, name, i) for i in size.prompts]
            found, _ = await write(client, asked)
            assert found == wanted, name


async def test_a_drafter_that_is_wrong_changes_no_text(
    stack: Stack, size: Size, reference: Reference
) -> None:
    """The drafter sends the protocol's messages over a socket, as one in any language would."""
    async with Client(stack.address) as client, drafting(client, "bad", wrong, 0.0):
        for name in ("bad", ""):
            asked = [request(reference.prompts[i], size, name) for i in size.prompts]
            found, _ = await write(client, asked)
            for index, tokens in zip(size.prompts, found, strict=True):
                assert tokens == reference.generate(index)[: len(tokens)]
