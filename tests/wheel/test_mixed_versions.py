"""An older version works beside today's: each pair of processes, a rolling update, libraries.

OUTRIDER_OLD_RELEASE is the folder of a release, as `make release INTO=FOLDER` writes it. A release
of today's version number is relabelled, so that verifiers of the two versions do not continue each
other's answers, as with any two versions. `pytest -rP` prints the tables.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider import __version__
from outrider.protocol.messages import SamplingParams, SpeculationOptions
from outrider_bench.chaos.requests import COUNT
from tests.serving import serving
from tests.stack import Client, Process, prompts, running
from tests.stack import Stack as OwnStack
from tests.wheel.conftest import ROOT, environment, run
from tests.wheel.mixed import (
    FAMILIES,
    Choices,
    Load,
    Reply,
    Stack,
    Version,
    ask_all,
    drafted,
    plain_texts,
)
from tests.wheel.test_release import CALLS

OLD_RELEASE = os.environ.get("OUTRIDER_OLD_RELEASE", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not OLD_RELEASE,
        reason="takes ten minutes; set OUTRIDER_OLD_RELEASE to the folder of a release to run it",
    ),
]

FEW = (0, 10)
"""A greedy request for each family."""


@pytest.fixture(scope="module")
def release() -> Path:
    """Return the folder of the old version's release."""
    return Path(OLD_RELEASE)


@pytest.fixture(scope="module")
def old(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Version:
    """Return the old version, in an environment away from the checkout."""
    [wheel] = release.glob("outrider-*.whl")
    python = environment(tmp_path_factory.mktemp("old") / "venv", wheel)
    number = wheel.name.split("-")[1]
    if number != __version__:
        return Version("old", number, python)
    relabelled = Version("old", "0.0.0", python)
    relabelled.change("outrider/__init__.py", '__version__ = ".*"', '__version__ = "0.0.0"')
    return relabelled


@pytest.fixture(scope="module")
def new() -> Version:
    """Return today's version, in the checkout."""
    return Version("new", __version__, Path(sys.executable))


@dataclass(frozen=True)
class Pair:
    """Which version of each process served some requests, and what became of the requests."""

    gateway: str
    verifier: str
    drafters: str
    replies: Sequence[Reply]
    plain: dict[int, Choices]

    @property
    def equal(self) -> int:
        """The number of answers that equal plain decoding's at the same verifier."""
        return sum(reply.choices == self.plain[reply.number] for reply in self.replies)

    @property
    def accepted(self) -> dict[str, int]:
        """The accepted draft tokens of each family."""
        return {
            family: sum(
                reply.accepted
                for reply in self.replies
                if drafted(reply.number)["drafter_family"] == family
            )
            for family in FAMILIES
        }

    @property
    def errors(self) -> list[str]:
        """What ended answers early."""
        return [reply.error for reply in self.replies if reply.error]

    @property
    def works(self) -> bool:
        """True if all answers are whole and right, and each family's drafts were accepted."""
        is_whole = self.equal == len(self.replies) and not self.errors
        return is_whole and all(self.accepted.values())


async def pairs(old: Version, new: Version, numbers: Sequence[int]) -> list[Pair]:
    """Send requests through each combination of gateway, verifier and drafters; print a table."""
    both = (old, new)
    # A mixed pair may never become ready; its requests then show that.
    unmixed = [f"{each.name} {each.name}" for each in both]
    found = []
    with Stack() as stack:
        for verifier in both:
            stack.add_verifier(verifier.name, verifier)
        for gateway, verifier in itertools.product(both, both):
            stack.add_gateway(f"{gateway.name} {verifier.name}", gateway, verifier.name)
        await stack.ready(*unmixed)
        plain = {
            each.name: await plain_texts([stack.gateways[way]], numbers)
            for each, way in zip(both, unmixed, strict=True)
        }
        for drafters in both:
            stack.add_drafters(drafters)
            await stack.ready(*unmixed)
            for way, url in stack.gateways.items():
                gateway_name, verifier_name = way.split()
                replies = await ask_all([url], numbers, drafted)
                texts = plain[verifier_name]
                found.append(Pair(gateway_name, verifier_name, drafters.name, replies, texts))
            await stack.stop(*FAMILIES)
    print("\n| gateway | verifier | drafters | requests | equal texts | errors | accepted |")
    print("| --- | --- | --- | ---: | ---: | ---: | --- |")
    for pair in found:
        accepted = ", ".join(f"{family} {count}" for family, count in pair.accepted.items())
        print(
            f"| {pair.gateway} | {pair.verifier} | {pair.drafters} | {len(pair.replies)} "
            f"| {pair.equal} | {len(pair.errors)} | {accepted} |"
        )
    return found


async def test_each_pair_of_versions_writes_plain_decodings_texts(
    old: Version, new: Version
) -> None:
    found = await pairs(old, new, range(COUNT))
    assert len(found) == 8
    assert [pair for pair in found if not pair.works] == []


async def test_a_changed_field_number_is_found(old: Version, new: Version, tmp_path: Path) -> None:
    """The planted fault gives a proposal's base_length another field number: the peer reads 0."""
    changed = old.copy(tmp_path / "venv")
    changed.change("outrider/v1/drafts_pb2.py", r"(?<=se_length)\\x18\\x02", r"\x18\x0e")
    found = await pairs(changed, new, FEW)
    broken = {(pair.drafters, pair.verifier) for pair in found if not pair.works}
    assert broken == {("old", "new"), ("new", "old")}


SERVICE = "outrider/internal/v1/token_streams_pb2_grpc.py"
LINK = "outrider/protocol/link_versions.py"


@pytest.mark.parametrize(
    ("file", "pattern", "replacement"),
    [
        (SERVICE, "internal.v1.TokenStreamService", "internal.v1.TokensService"),
        (LINK, r"SPOKEN = Versions\(1, 1\)", "SPOKEN = Versions(2, 2)"),
    ],
    ids=["a renamed service", "no common version"],
)
async def test_a_link_that_the_other_version_cannot_use_is_found(
    old: Version, new: Version, tmp_path: Path, file: str, pattern: str, replacement: str
) -> None:
    changed = old.copy(tmp_path / "venv")
    changed.change(file, pattern, replacement)
    found = await pairs(changed, new, FEW)
    broken = {(pair.gateway, pair.verifier) for pair in found if not pair.works}
    assert broken == {("old", "new"), ("new", "old")}


PARTS = ("verifier-1", "verifier-2", "gateway-1", "gateway-2", *FAMILIES)


async def test_a_rolling_update_and_its_undoing_lose_and_alter_nothing(
    old: Version, new: Version
) -> None:
    with Stack() as stack:
        for name in PARTS[:2]:
            stack.add_verifier(name, old)
        for name in PARTS[2:4]:
            stack.add_gateway(name, old, *PARTS[:2])
        stack.add_drafters(old)
        await stack.ready()
        urls = list(stack.gateways.values())
        texts = [await plain_texts(urls, range(COUNT))]
        async with Load(urls) as load:
            for name in PARTS:
                await stack.replace(name, new)
                await load.more(10)
            texts.append(await plain_texts(urls, range(COUNT)))
            for name in reversed(PARTS):
                await stack.replace(name, old)
                await load.more(10)
    lost = [reply for reply in load.replies if reply.error]
    altered = [
        reply
        for reply in load.replies
        if reply.choices not in [each[reply.number] for each in texts]
    ]
    turned_away = sum(reply.turned_away > 0 for reply in load.replies)
    accepted = sum(reply.accepted for reply in load.replies)
    print(f"\n{len(load.replies)} requests, {len(lost)} lost, {len(altered)} altered,")
    print(f"{turned_away} sent to the other gateway, {accepted} draft tokens accepted")
    assert (lost, altered) == ([], [])
    assert accepted > 0


@pytest.fixture(scope="module")
def stack() -> Iterator[OwnStack]:
    """Yield a verifier of today's version, which waits for drafts."""
    stack = OwnStack("--always-draft", "--draft-tokens", "fixed:4")
    with running(stack):
        yield stack


async def test_a_drafter_of_the_old_library_drafts_for_todays_verifier(
    old: Version, stack: OwnStack, tmp_path: Path
) -> None:
    example = shutil.copy(ROOT / "examples/ngram_drafter.py", tmp_path)
    command = (str(old.python), "-P", str(example), stack.address)
    greedy, plain = SamplingParams(temperature=0), SpeculationOptions(enabled=False)
    async with Client(stack.address) as client:
        expected = await client.answers(prompts(4), greedy, plain)
        with Process("", command=command):
            await client.connected("example-ngram")
            drafts = SpeculationOptions(drafter_family="example-ngram")
            answers = await client.answers(prompts(4), greedy, drafts)
    assert answers.texts == expected.texts
    assert answers.accepted_token_count > 0


def test_a_client_of_the_old_protos_calls_todays_gateway(release: Path, tmp_path: Path) -> None:
    [protos] = release.glob("outrider_protos-*.whl")
    python = environment(tmp_path / "venv", protos)
    shutil.copy(ROOT / "clients/python/client/client.py", tmp_path)
    with serving(tmp_path / "log", "--target", "models/target", "--drafter", "ngram"):
        address = re.search(r"gRPC +(\S+) \(outrider", (tmp_path / "log").read_text())
        assert address
        called = run([str(python), "-c", CALLS, address[1]], tmp_path)
    assert called.returncode == 0, called.stderr
    assert called.stdout.split()[1::2] == ["stream", "cancel", "deadline", "health", "reflection"]
