"""The n-gram examples of the drafter libraries, built from this tree, keep the stream contract."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from stack import Client, Process, Stack, prompt_texts, running

from outrider.conformance.kit import Kit
from outrider.conformance.rules import Outcome
from outrider.process.certs import Authority
from outrider.process.tls import Tls
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from outrider.tokenizer import load_tokenizer

CLIENTS = Path(__file__).parents[2] / "clients"
COMMANDS = {
    "go": [str(CLIENTS / "go/build/ngram"), "{address}"],
    "typescript": ["node", str(CLIENTS / "typescript/drafter/dist/examples/ngram.js"), "{address}"],
}
NEEDED = {
    "go": ["go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"],
    "typescript": ["npm", "node"],
}
BUILD = {"go": CLIENTS / "go/build.sh", "typescript": CLIENTS / "typescript/drafter/build.sh"}


FAMILIES = {"go": "go-ngram", "typescript": "ts-ngram"}
TARGET = str(CLIENTS.parent / "models/target")
TOKENS = 64
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
PLAIN = SpeculationOptions(enabled=False)


@pytest.fixture(scope="module", params=COMMANDS)
def language(request: pytest.FixtureRequest) -> str:
    """A language, after its example was built."""
    name: str = request.param
    missing = [tool for tool in NEEDED[name] if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, which clients/install.sh installs")
    subprocess.run([BUILD[name]], check=True, timeout=300)
    return name


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A verifier that waits for each draft of four tokens, and the built-in n-gram drafter."""
    stack = Stack("--always-draft", "--draft-tokens", "fixed:4")
    stack.add_drafter("ngram-1", "ngram", "--max-draft-len", "16")
    with running(stack):
        yield stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.address) as made:
        yield made


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [encoding.ids for encoding in load_tokenizer(TARGET).encode_batch(prompt_texts())]


def example(stack: Stack, language: str) -> Process:
    """The language's example as a drafter of this stack."""
    command = [part.format(address=stack.address) for part in COMMANDS[language]]
    return Process("", command=command)


async def connected(client: Client, family: str, count: int) -> None:
    """Wait until `count` drafters of a family are connected."""
    deadline = time.monotonic() + 30
    while True:
        drafters = (await client.model()).drafters
        found = [one for one in drafters if one.family == family and one.connected]
        if len(found) == count:
            return
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.1)


async def written(
    client: Client, prompts: list[list[int]], sampling: SamplingParams, options: SpeculationOptions
) -> tuple[list[list[int]], float]:
    """Generate the texts, eight at a time; returns them and the acceptance rate."""
    texts: list[list[int]] = []
    drafted = accepted = 0
    for first in range(0, len(prompts), 8):
        requests = [
            TokenRequest(prompt, TOKENS, sampling, speculation=options, ignore_eos=True)
            for prompt in prompts[first : first + 8]
        ]
        for answer in await asyncio.gather(*(client.generate(request) for request in requests)):
            texts.append([token for chunk in answer for token in chunk.token_ids])
            stats = answer[-1].stats
            assert stats is not None
            drafted += stats.draft_token_count
            accepted += stats.accepted_token_count
    return texts, accepted / drafted if drafted else 0.0


@pytest.mark.slow
async def test_its_acceptance_rate_equals_the_built_in_drafters(
    stack: Stack, client: Client, prompts: list[list[int]], language: str
) -> None:
    sampling = SAMPLED
    expected, _ = await written(client, prompts, sampling, PLAIN)
    process = example(stack, language)
    try:
        await connected(client, FAMILIES[language], 1)
        options = SpeculationOptions(drafter_family=FAMILIES[language])
        own, own_rate = await written(client, prompts, sampling, options)
        options = SpeculationOptions(drafter_id="ngram-1")
        built_in, built_in_rate = await written(client, prompts, sampling, options)
    finally:
        process.stop()
        process.log.close()
    assert own == built_in == expected
    assert built_in_rate > 0.1
    assert own_rate == pytest.approx(built_in_rate, abs=0.02)


@pytest.mark.slow
def test_the_example_passes_the_conformance_kit_over_tls(language: str, tmp_path: Path) -> None:
    authority = Authority.new()
    authority.write(tmp_path)
    for role in ("verifier", "drafter"):
        authority.write_issued(tmp_path, role, role, [], timedelta(hours=1))
    tls = Tls(tmp_path / "verifier.pem", tmp_path / "verifier.key", tmp_path / "ca.pem")
    files = ("drafter.pem", "drafter.key", "ca.pem")
    command = [*COMMANDS[language], *(str(tmp_path / file) for file in files)]
    kit = Kit(command, "f" * 64, 4096, tls)
    asyncio.run(kit.run())
    assert [(name, kit.results[name].reason) for name in kit.failed] == []
    assert kit.results["trees"].outcome is Outcome.PASS
    assert kit.notes == {}
