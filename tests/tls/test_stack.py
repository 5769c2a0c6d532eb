"""`outrider serve --certs` as its users run it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
from sites import Site, until
from stack import ROOT, TARGET, Process

from outrider.process.ports import free_port

PROMPT = "def add(first, second):\n    return first + second\n\ndef add(first,"


async def completed(client: httpx.AsyncClient, drafter: str, process: Process) -> dict[str, object]:
    """Wait until the drafter is connected, and return the metrics of a completion with it."""
    async with asyncio.timeout(90):
        while not await connected(client, drafter):
            assert process.popen.poll() is None, process.output()
            await asyncio.sleep(0.1)
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body |= {"speculation": {"drafter_id": drafter, "metrics": True}}
    response = await client.post("/v1/completions", json=body, timeout=60)
    answer = response.raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == 24
    found: dict[str, object] = answer["metrics"]["speculative_decoding"]
    return found


async def connected(client: httpx.AsyncClient, drafter: str) -> bool:
    try:
        body = (await client.get("/readyz")).json()
    except httpx.TransportError:
        return False
    drafters = [found for verifier in body["verifiers"] for found in verifier.get("drafters", [])]
    return any(found["id"] == drafter and found["connected"] for found in drafters)


async def test_serve_runs_its_stack_with_a_folder_of_certificates(tmp_path: Path) -> None:
    outrider = [sys.executable, "-m", "outrider.launch.cli"]
    command = [*outrider, "certs", str(tmp_path / "certs")]
    await asyncio.to_thread(subprocess.run, command, cwd=ROOT, check=True, capture_output=True)
    http = free_port()
    words = ["--http-port", str(http), "--grpc-port", str(free_port()), "--verifier-port", "0"]
    words += ["--drafter", "ngram", "--certs", str(tmp_path / "certs"), "--always-draft"]
    serving = Process("", command=[*outrider, "serve", TARGET, *words])
    try:
        site = Site(tmp_path)
        trusting = site.context(None)
        trusting.load_verify_locations(tmp_path / "certs/ca.pem")
        async with httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{http}", verify=trusting
        ) as client:
            found = await completed(client, "drafter/ngram-1", serving)
        assert found["num_draft_tokens"]
        await until(lambda: "Ready." in serving.output())
        assert f"curl --cacert {tmp_path / 'certs/ca.pem'} https://127.0.0.1" in serving.output()
    finally:
        status = await asyncio.to_thread(serving.stop, 30)
        serving.log.close()
    assert status == 0
