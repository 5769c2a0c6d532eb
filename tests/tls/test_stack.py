"""Whole stacks of real processes over mutual TLS."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
from chaos_proxy import chaos_proxy
from sites import Site, until
from stack import ROOT, TARGET, Process, free_port
from tokenizers import Tokenizer

from outrider.process.tls import Tls
from outrider.v1 import verifier_pb2

PROMPT = "def add(first, second):\n    return first + second\n\ndef add(first,"


def flags(tls: Tls, prefix: str = "tls") -> list[str]:
    return [f"--{prefix}-cert", str(tls.cert), f"--{prefix}-key", str(tls.key)]


async def completed(client: httpx.AsyncClient, drafter: str, process: Process) -> dict[str, object]:
    """Wait until the drafter is connected, and return the metrics of a completion with it."""
    async with asyncio.timeout(90):
        while not await connected(client, drafter):
            assert process.popen.poll() is None, process.output()
            await asyncio.sleep(0.1)
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    body |= {"speculation": {"drafter": drafter, "metrics": True}}
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


async def test_processes_draft_and_verify_and_the_wire_shows_no_token(site: Site) -> None:
    ca = ["--tls-ca", str(site.ca)]
    served, drafting, mine = map(site.issue, ("verifier", "drafter", "gateway"))
    port, http = free_port(), free_port()
    listen = f"127.0.0.1:{port}"
    options = ["--target", TARGET, "--dtype", "float32", "--threads", "1", "--always-draft"]
    processes = [Process("verifier_svc", *options, "--listen", listen, *flags(served), *ca)]
    async with chaos_proxy(port) as wire:
        address = f"127.0.0.1:{wire.port}"
        options = ["--family", "ngram", "--verifier", address, "--id", "near"]
        processes.append(Process("drafter_svc", *options, *flags(drafting), *ca))
        options = ["--verifier", address, "--tokenizer", TARGET, "--http-port", str(http)]
        options += ["--grpc-listen", "127.0.0.1:0", *flags(mine), *ca, *flags(mine, "public-tls")]
        processes.append(Process("gateway", *options))
        try:
            async with httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{http}", verify=site.context(None)
            ) as client:
                found = await completed(client, "drafter/near", processes[0])
        finally:
            for process in reversed(processes):
                await asyncio.to_thread(process.stop)
                process.log.close()
    assert found["num_draft_tokens"]
    ids = Tokenizer.from_file(f"{TARGET}/tokenizer.json").encode(PROMPT).ids
    packed = verifier_pb2.GenerateTokensRequest(prompt_token_ids=ids).SerializeToString()
    assert packed not in wire.carried
    assert b"drafter/near" not in wire.carried
    assert len(wire.carried) > 10_000


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
