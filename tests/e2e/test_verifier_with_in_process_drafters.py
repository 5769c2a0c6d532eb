"""To clients and operators, a verifier with drafters in its process is like any other verifier."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from outrider.process.network.ports import free_port
from outrider.protocol.messages import SamplingParams, SpeculationOptions
from tests.losslessness.settings import SETTINGS as ALL_SETTINGS
from tests.stack import ROOT, Client, Stack, prompts, running

MODULE = "outrider_cli.verifier"
HEAD = str(ROOT / "models/heads/eagle3")
DRAFT = str(ROOT / "models/draft")
METRICS_PORT = free_port()
PROMPTS = prompts(every=14)
PLAIN = SpeculationOptions(enabled=False)
OPTIONS = {
    "the head": SpeculationOptions(drafter_family="head", always_draft=True),
    "the draft model": SpeculationOptions(drafter_family="model", always_draft=True),
    "both and a drafter over gRPC": SpeculationOptions(always_draft=True),
    "as it pays": SpeculationOptions(),
}
SETTINGS = {"seeded": SamplingParams(0.9, seed=7)} | {
    f"{name}, {how}": replace(sampling, **change)
    for name, sampling in ALL_SETTINGS.items()
    for how, change in {"greedy": {"temperature": 0.0}, "seeded": {"seed": 7}}.items()
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    in_process = ["--in-process", f"head={HEAD}", "--in-process", f"model={DRAFT}"]
    stack = Stack(*in_process, "--metrics-port", str(METRICS_PORT), module=MODULE)
    stack.add_drafter("ngram-1", "ngram")
    with running(stack):
        yield stack


@pytest.mark.parametrize(
    "setting",
    [pytest.param(each, marks=[] if each == "seeded" else pytest.mark.slow) for each in SETTINGS],
)
async def test_texts_equal_plain_ones(stack: Stack, setting: str) -> None:
    """The slow suite has every setting of the losslessness suite, each greedy and with a seed."""
    sampling = SETTINGS[setting]

    async with Client(stack.address) as client:
        plain = await client.answers(PROMPTS, sampling, PLAIN)
        for name, options in OPTIONS.items():
            drafted = await client.answers(PROMPTS, sampling, options)
            assert drafted.texts == plain.texts, name
            if setting == "seeded" and options.always_draft:
                assert drafted.accepted_token_count > 0, name


@pytest.mark.parametrize("family", ["head", "model"])
async def test_operators_see_each_as_a_drafter(stack: Stack, family: str) -> None:
    options = SpeculationOptions(drafter_family=family, always_draft=True)
    async with Client(stack.address) as client:
        await client.answers(PROMPTS[:1], SamplingParams(0.0), options)
        [drafter] = [each for each in (await client.model()).drafters if each.family == family]
    assert drafter.connected
    assert drafter.acceptance_rate is not None
    assert drafter.acceptance_rate > 0
    assert drafter.token_s is not None
    async with httpx.AsyncClient(timeout=60) as scraper:
        page = (await scraper.get(f"http://127.0.0.1:{METRICS_PORT}/metrics")).text
    for name in ("spec_decode_num_accepted_tokens_total", "drafter_proposed_tokens_total"):
        rows = re.findall(rf"^outrider:{name}\{{(.*)\}} ([\d.e+]+)$", page, re.MULTILINE)
        counts = [float(n) for labels, n in rows if f'drafter="{drafter.drafter_id}"' in labels]
        assert sum(counts) > 0
    # Two drafters share the page, which may declare each metric only once.
    names = re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)
    assert len(names) == len(set(names))
