"""The n-gram examples of the drafter libraries, built from this tree, keep the stream contract."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from outrider.conformance.kit import Kit
from outrider.conformance.rules import Outcome
from outrider.protocol.messages import SamplingParams, SpeculationOptions
from tests.certificates import Site
from tests.stack import Answers, Client, Process, Stack, prompts, running

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
TOKENS = 64
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
PLAIN = SpeculationOptions(enabled=False)


@pytest.fixture(scope="module", params=COMMANDS)
def language(request: pytest.FixtureRequest) -> str:
    """Return a language, after its example was built."""
    name: str = request.param
    missing = [tool for tool in NEEDED[name] if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, which clients/install.sh installs")
    subprocess.run([BUILD[name]], check=True, timeout=300)
    return name


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Yield a verifier that waits for drafts of four tokens, with the built-in n-gram drafter."""
    stack = Stack("--always-draft", "--draft-tokens", "fixed:4")
    stack.add_drafter("ngram-1", "ngram", "--max-draft-len", "16")
    with running(stack):
        yield stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.address) as made:
        yield made


def example(stack: Stack, language: str) -> Process:
    """Return the language's example as a drafter of this stack."""
    command = [part.format(address=stack.address) for part in COMMANDS[language]]
    return Process("", command=command)


@pytest.mark.slow
async def test_its_acceptance_rate_equals_the_built_in_drafters(
    stack: Stack, client: Client, language: str
) -> None:
    family = FAMILIES[language]

    async def answers(options: SpeculationOptions) -> Answers:
        return await client.answers(prompts(), SAMPLED, options, TOKENS)

    expected = await answers(PLAIN)
    with example(stack, language):
        await client.connected(family)
        own = await answers(SpeculationOptions(drafter_family=family))
        built_in = await answers(SpeculationOptions(drafter_id="ngram-1"))
    assert own.texts == built_in.texts == expected.texts
    assert built_in.acceptance_rate > 0.1
    assert own.acceptance_rate == pytest.approx(built_in.acceptance_rate, abs=0.02)


@pytest.mark.slow
def test_the_example_passes_the_conformance_kit_over_tls(language: str, tmp_path: Path) -> None:
    site = Site(tmp_path)
    own = site.issue("drafter")
    command = [*COMMANDS[language], str(own.cert), str(own.key), str(own.ca)]
    kit = Kit(command, "f" * 64, 4096, site.issue("verifier"))
    asyncio.run(kit.run())
    assert [(name, kit.results[name].reason) for name in kit.failed] == []
    assert kit.results["trees"].outcome is Outcome.PASS
    assert kit.notes == {}
