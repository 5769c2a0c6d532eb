"""A drafter's weights are replaced under load: no text changes, and versions are told apart."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from outrider.process.network.ports import free_port
from outrider.protocol.messages import SamplingParams, SpeculationOptions
from tests.stack import DRAFT, ROOT, TARGET, Client, Process, Stack, prompts, running
from tests.waiting import until

WAIT_S = 240.0
STRETCH = 1000
"""The least number of tokens that are verified with each version of the weights."""
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, seed=11)
ALWAYS = SpeculationOptions(always_draft=True)
PLAIN = SpeculationOptions(enabled=False)
HEAD = str(ROOT / "models/heads/eagle3")


def worse(folder: str, into: Path) -> Path:
    """Copy weights, and add noise that makes their guesses worse."""
    shutil.copytree(folder, into)
    generator = torch.Generator().manual_seed(5)
    [path] = into.glob("*.safetensors")
    weights = load_file(path)
    for name, weight in weights.items():
        if weight.is_floating_point():
            numbers = weight.float()
            noise = torch.randn(weight.shape, generator=generator)
            noisy = numbers + 0.5 * numbers.std(correction=0) * noise
            weights[name] = noisy.to(weight.dtype)
    save_file(weights, path, metadata={"format": "pt"})
    return into


def truncated(folder: str, into: Path) -> Path:
    """Copy weights without the second half of their file."""
    shutil.copytree(folder, into)
    [path] = into.glob("*.safetensors")
    os.truncate(path, path.stat().st_size // 2)
    return into


def other_shape(folder: str, into: Path) -> Path:
    """Copy weights with a configuration that says another shape."""
    shutil.copytree(folder, into)
    config = json.loads((into / "config.json").read_text())
    config["intermediate_size"] += 16
    (into / "config.json").write_text(json.dumps(config))
    return into


class Swapped:
    """A verifier, and a drafter that loads the weights to which a link points."""

    def __init__(self, family: str, weights: str, folder: Path) -> None:
        self.link = folder / "current"
        self.link.symlink_to(weights)
        self.metrics = f"http://127.0.0.1:{(port := free_port())}/metrics"
        self.stack = Stack("--metrics-port", str(port))
        self._family = family
        self.drafter = self.start("d1")

    def start(self, name: str) -> Process:
        """Start a drafter with the weights to which the link points."""
        flags = ["--model", str(self.link)]
        if self._family == "head":
            flags = ["--head", str(self.link), "--target", TARGET, "--dtype", "float32"]
        self.stack.add_drafter(name, self._family, *flags)
        return self.stack.drafters[name]

    def swap(self, weights: str | Path) -> None:
        """Let the link point to other weights, and ask the drafter to load them."""
        following = self.link.with_name("following")
        following.symlink_to(weights)
        following.replace(self.link)
        self.drafter.popen.send_signal(signal.SIGHUP)

    async def refused(self, weights: Path, serving: str) -> None:
        """Ask for unusable weights; wait until the log says that the weights `serving` stay."""
        sentence = f"the new weights were not loaded, and {serving} draft on: "
        before = self.drafter.output().count(sentence)
        self.swap(weights)
        await until(lambda: self.drafter.output().count(sentence) == before + 1, WAIT_S)

    async def counts(self) -> dict[tuple[str, str], dict[str, float]]:
        """Return verified and accepted tokens, keyed by drafter and version, oldest first."""
        async with httpx.AsyncClient(timeout=60) as client:
            text = (await client.get(self.metrics)).text
        found: dict[tuple[str, str], dict[str, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.endswith("tokens_by_weights_total"):
                    key = sample.labels["drafter"], sample.labels["weights_version"]
                    kind = "accepted" if "accepted" in sample.name else "verified"
                    found.setdefault(key, {})[kind] = sample.value
        return found

    async def drafted(self, least: int, known: set[tuple[str, str]]) -> tuple[str, str]:
        """Wait until `least` tokens of weights that are not in `known` are verified.

        Adds drafter and version of these weights to `known`, and returns them.
        """
        new: list[tuple[str, str]] = []

        async def are_there() -> bool:
            """Look for weights that are not in `known`."""
            counts = await self.counts()
            new[:] = [
                key
                for key, each in counts.items()
                if key not in known and each.get("verified", 0) >= least
            ]
            return bool(new)

        await until(are_there, WAIT_S)
        known.add(new[0])
        return new[0]


class Load:
    """Sends requests without a pause, and compares their texts with plain decoding's texts."""

    def __init__(self, client: Client, texts: list[list[int]]) -> None:
        self._client = client
        self._texts = texts
        self._plain: dict[str, list[list[int]]] = {}
        self.compared = 0
        self.altered = 0

    async def begin(self) -> None:
        """Decode every text plainly."""
        for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
            answers = await self._client.answers(self._texts, sampling, PLAIN)
            self._plain[name] = answers.texts

    async def run(self, until_set: asyncio.Event) -> None:
        """Ask for greedy and seeded texts in turns."""
        while not until_set.is_set():
            for name, sampling in (("greedy", GREEDY), ("seeded", SEEDED)):
                answers = await self._client.answers(self._texts, sampling, ALWAYS)
                self.compared += len(answers.texts)
                pairs = zip(answers.texts, self._plain[name], strict=True)
                self.altered += sum(drafted != plain for drafted, plain in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "weights"), [("model", DRAFT), ("head", HEAD)])
async def test_swaps_under_load_alter_no_text(family: str, weights: str, tmp_path: Path) -> None:
    """Swap to worse weights and back by signal, refuse broken files, and swap by a new process."""
    bad = worse(weights, tmp_path / "bad")
    served = Swapped(family, weights, tmp_path)
    with running(served.stack):
        async with Client(served.stack.address) as client:
            load = Load(client, prompts(every=5))
            await load.begin()
            over = asyncio.Event()
            loading = asyncio.create_task(load.run(over))
            known: set[tuple[str, str]] = set()
            good = await served.drafted(STRETCH, known)
            served.swap(bad)
            poor = await served.drafted(STRETCH, known)
            await served.refused(truncated(weights, tmp_path / "truncated"), poor[1])
            await served.refused(other_shape(weights, tmp_path / "other"), poor[1])
            before = await served.counts()
            served.swap(weights)
            await until(lambda: served.drafter.output().count("registered with") >= 3, WAIT_S)

            async def again() -> bool:
                """Tell whether the first weights draft once more."""
                now = (await served.counts())[good]["verified"]
                return now >= before[good]["verified"] + STRETCH

            await until(again, WAIT_S)
            served.start("d2")
            await until(lambda: "registered with" in served.stack.drafters["d2"].output(), WAIT_S)
            first = served.stack.drafters.pop("d1")
            first.stop()
            said = first.output()
            first.log.close()
            taken = await served.drafted(STRETCH, known)
            over.set()
            await loading
            counts = await served.counts()
    assert load.altered == 0
    assert load.compared > 0
    assert poor[0] == good[0] == "d1"
    assert taken == ("d2", good[1])
    rates = {key: each["accepted"] / each["verified"] for key, each in counts.items()}
    assert rates[poor] < 0.85 * rates[good]
    print(f"\n{family}: {load.compared} texts, {load.altered} altered")
    for key, each in counts.items():
        print(key, int(each["verified"]), int(each["accepted"]), f"{rates[key]:.3f}")
    print("\n".join(line for line in said.splitlines() if "weights" in line or "dialling" in line))
