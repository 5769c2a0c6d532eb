"""Drafters on 64-bit ARM draft for a verifier on x86; gateway and traces show where they run.

The drafters are whole processes of the cross-built wheel, with ARM's Python, gRPC and torch. Only
the processor is emulated. With the emulation, a test takes minutes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.arm import arm
from tests.stack import DRAFT, Client, GatewayProcess, Process, Stack, behind_gateway
from tests.trace_collector import Collector, attributes, collecting
from tests.waiting import until
from tests.web.site_rig import chromium

pytestmark = arm.MARKS
START_S = 1200.0
"""The model drafter imports torch, which takes minutes here on a busy machine."""


def started(family: str, address: str, core: int, packages: Path) -> Process:
    """Return a drafter on ARM; it pins itself to one core of this machine."""
    flags = ["--family", family, "--verifier", address, "--id", f"arm-{family}"]
    flags += ["--cores", str(core)]
    if family == "model":
        flags += ["--model", DRAFT, "--dtype", "float32"]
    return Process("", *flags, command=[*arm.python(packages), "-m", "drafter_svc"])


@contextmanager
def running(family: str, core: int, packages: Path) -> Iterator[tuple[Stack, GatewayProcess]]:
    """Yield a stack and a gateway: the verifier waits for the drafts of a drafter on ARM."""
    stack = Stack("--always-draft")
    stack.drafters[f"arm-{family}"] = started(family, stack.address, core, packages)
    with behind_gateway(stack, timeout_s=START_S) as gateway:
        yield stack, gateway


@asynccontextmanager
async def traced(
    family: str, core: int, packages: Path, patch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Stack, GatewayProcess, Collector]]:
    """Yield what `running` yields, and a collector of the processes' spans.

    The processes have sent all spans once the block has ended.
    """
    async with collecting() as (collector, endpoint):
        # The processes inherit this variable.
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        context = running(family, core, packages)
        stack, gateway = await asyncio.to_thread(context.__enter__)
        try:
            yield stack, gateway, collector
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)


async def check_page(url: str, name: str, shown: str) -> None:
    """Check that the page's box of a drafter has this text."""
    async with chromium() as browser:
        page = await browser.new_page()
        await page.goto(url)
        box = page.locator("#map .process").filter(has_text=name).last
        await box.get_by_text(shown).wait_for()


def check_trace(collector: Collector, name: str, expected: dict[str, Any]) -> None:
    """Check that the drafter sent spans, and that the verifier's steps say where it runs."""
    assert name in collector.instances
    spans = [(service, span.name, attributes(span)) for service, span in collector.spans]
    assert any(each[:2] == ("outrider-drafter", "propose") for each in spans)
    steps = [found for _, kind, found in spans if kind == "verify" and "outrider.drafter" in found]
    assert steps
    for step in steps:
        found = {
            key: getattr(step[f"outrider.{key}"], step[f"outrider.{key}"].WhichOneof("value"))
            for key in expected
        }
        assert found == expected


@pytest.mark.parametrize("family", ["ngram", "model"])
async def test_a_drafter_on_arm_drafts_for_a_verifier_on_x86(
    family: str, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, core = f"arm-{family}", max(os.sched_getaffinity(0))
    async with traced(family, core, packages, monkeypatch) as (stack, gateway, collector):
        async with Client(stack.address) as client:
            [listed] = (await client.model()).drafters
            place = replace(listed.placement, host="")
            assert (place.architecture, place.cores, place.kind) == ("aarch64", (core,), "cpu")
            for label, sampling in arm.SAMPLINGS.items():
                sums = await arm.equal_texts(client, sampling)
                drafts = f"{sums.accepted_token_count} of {sums.draft_token_count} drafts accepted"
                print(f"{name}, {label}: {len(sums.texts)} equal texts, {drafts}")
                assert sums.accepted_token_count > 0
        async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as http:
            body = {"prompt": "def read_file(path):\n    ", "max_tokens": 24, "temperature": 0}
            usage = (await http.post("/v1/completions", json=body)).json()["usage"]
            assert usage["completion_tokens"] > 0
            [verifier] = (await http.get("/readyz")).json()["verifiers"]
            [shown] = verifier["drafters"]
            assert (shown["architecture"], shown["cores"]) == ("aarch64", 1)
        await check_page(gateway.url, name, f"{listed.placement.host} aarch64")
        output = stack.drafters[name].output
        await until(lambda: "registered with" in output())
        print(output())
        assert "the C kernels for CPUs were not built" not in output()
    expected = {"drafter": name, "family": family, "architecture": "aarch64", "cores": 1}
    check_trace(collector, name, expected)
