"""The gateway's draft counters with vLLM's names equal the verifier's."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from stack import TARGET, Process, Stack

from outrider.process.ports import free_port

PROMPTS = ("x = [1, 2, 3]\n" * 4, "def read(path):\n    ", "import os\nimport sys\n")


def counted(text: str, prefix: str) -> dict[tuple[str, str], float]:
    """Sums of the counters on speculative decoding over all drafters, by name and position."""
    sums: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # Only the verifier has counters by the shape of drafts.
            by_shape = "_by_shape" in sample.name or "_by_branch" in sample.name
            if sample.name.startswith(f"{prefix}:spec_decode") and sample.value and not by_shape:
                key = (sample.name.removeprefix(prefix), sample.labels.get("position", ""))
                sums[key] = sums.get(key, 0) + sample.value
    return sums


def differences(
    counts: dict[tuple[str, str], float], metrics_port: int
) -> set[tuple[tuple[str, str], float]]:
    """Counters that only one of gateway and verifier has, or with another value."""
    metrics = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text
    return counts.items() ^ counted(metrics, "outrider").items()


async def answer_all(url: str) -> None:
    """Send requests of every kind that ends by itself."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        deadline = time.monotonic() + 30
        while (await client.get("/readyz")).status_code != 200:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        # No end-of-text: the gateway would not see draft tokens after it.
        common = {"max_tokens": 60, "ignore_eos": True}
        bodies = [
            {**common, "prompt": prompt, "stream": stream}
            for prompt in PROMPTS
            for stream in (True, False)
        ]
        bodies += [
            {**common, "prompt": PROMPTS[0], "n": 2, "temperature": temperature}
            for temperature in (0, 1)
        ]
        posts = [client.post("/v1/completions", json=body) for body in bodies]
        for answer in await asyncio.gather(*posts):
            assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_the_gateways_draft_counters_equal_the_verifiers() -> None:
    gateway_port = free_port()
    metrics_port = free_port()
    stack = Stack("--metrics-port", str(metrics_port), "--always-draft")
    stack.add_drafter("model-1", "model")
    listen = ("--http-port", str(gateway_port), "--grpc-listen", "127.0.0.1:0")
    gateway = Process("gateway", "--verifier", stack.address, "--tokenizer", TARGET, *listen)
    url = f"http://127.0.0.1:{gateway_port}"
    try:
        stack.wait_ready()
        asyncio.run(answer_all(url))
        counts = counted(httpx.get(f"{url}/metrics").text, "vllm")
        # The verifier updates its counters at the end of a step.
        deadline = time.monotonic() + 10
        while differences(counts, metrics_port):
            assert time.monotonic() < deadline, differences(counts, metrics_port)
            time.sleep(0.1)
    finally:
        gateway.stop()
        gateway.log.close()
        stack.stop()
    assert counts[":spec_decode_num_drafts_total", ""] > 10
    assert counts[":spec_decode_num_accepted_tokens_per_pos_total", "0"] > 5
