"""vLLM's server with our scheduler: our drafters dial into its engine core."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from outrider.process.network.ports import free_port
from outrider.protocol.messages import TokenRequest
from outrider.v1 import drafts_pb2
from tests.e2e.test_features_of_a_target import FEATURES, PROMPT, WANTED, error, features
from tests.e2e.test_greedy_equality import Reference
from tests.stack import DRAFT, TARGET, Client, Process
from tests.vllm.test_vllm_engine import PROMPTS, Answer, drafting, garbage, silent, wrong
from tests.waiting import until
from verifier_svc.vllm.runner import engine_arguments

TOKENS = 40
FINAL = drafts_pb2.FeatureRequest(final_state=True)
START_S = 240


class VllmServer:
    """Runs `vllm serve` with a port for drafters."""

    def __init__(self, *environment: str) -> None:
        self.drafts = f"127.0.0.1:{free_port()}"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        arguments = engine_arguments(4, v2=False)
        command = [
            str(Path(sys.executable).parent / "vllm"),
            *("serve", TARGET, "--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", "m", "--dtype", "float32", "--max-model-len", "1024"),
            *("--max-num-seqs", "8", "--enforce-eager"),
            *("--scheduler-cls", arguments["scheduler_cls"]),
            *("--speculative-config", json.dumps(arguments["speculative_config"])),
        ]
        settings = [
            # Our loader, which other tests run in this process, sets it to 0.
            "VLLM_ENABLE_V1_MULTIPROCESSING=1",
            *environment,
            f"OUTRIDER_VERIFIER_LISTEN={self.drafts}",
            "OUTRIDER_VERIFIER_ALWAYS_DRAFT=1",
        ]
        self.process = Process("", command=["env", *settings, *command])

    async def wait_ready(self) -> None:
        async with httpx.AsyncClient(timeout=60) as client, asyncio.timeout(START_S):
            while True:
                assert self.process.popen.poll() is None, self.process.output()
                try:
                    if (await client.get(f"{self.url}/health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.3)

    async def complete(self, prompt: list[int]) -> list[int]:
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "return_token_ids": True,
        }
        async with httpx.AsyncClient(timeout=120) as client:
            answer = await client.post(f"{self.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    async def accepted(self) -> float:
        """Return the number of draft tokens accepted so far, as vLLM counts them."""
        async with httpx.AsyncClient(timeout=60) as client:
            page = (await client.get(f"{self.url}/metrics")).text
        name = "vllm:spec_decode_num_accepted_tokens_total"
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


@pytest.fixture(scope="module")
def server() -> Iterator[VllmServer]:
    server = VllmServer()
    try:
        asyncio.run(server.wait_ready())
        yield server
    finally:
        server.process.stop(60)
        server.process.log.close()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


async def check_texts(server: VllmServer, reference: Reference) -> None:
    indices = PROMPTS[:4]
    found = await asyncio.gather(*(server.complete(reference.prompts[i]) for i in indices))
    for index, tokens in zip(indices, found, strict=True):
        assert tokens == reference.generate(index)[: len(tokens)]
        assert len(tokens) == TOKENS or tokens[-1] in reference._ends


async def connected(server: VllmServer, count: int) -> None:
    async with Client(server.drafts) as client:

        async def holds() -> bool:
            return sum(each.connected for each in (await client.model()).drafters) == count

        await until(holds, 60)


async def test_texts_are_the_targets_with_no_drafter_with_two_and_with_one_killed(
    server: VllmServer, reference: Reference
) -> None:
    await check_texts(server, reference)
    assert await server.accepted() == 0
    dialled = ["--verifier", server.drafts, "--id"]
    ngram = Process("drafter_svc", "--family", "ngram", *dialled, "ngram-1")
    flags = ["--family", "model", "--model", DRAFT, "--dtype", "float32", "--threads", "1"]
    model = Process("drafter_svc", *flags, *dialled, "model-1")
    try:
        await connected(server, 2)
        await check_texts(server, reference)
        both = await server.accepted()
        assert both > 20
        ngram.kill()
        await connected(server, 1)
        await check_texts(server, reference)
        assert await server.accepted() > both
    finally:
        for process in (ngram, model):
            process.stop()
            process.log.close()


@pytest.mark.parametrize("answer", [wrong, garbage, silent], ids=["wrong", "garbage", "hung"])
async def test_a_bad_drafter_changes_no_text_of_vllms_server(
    server: VllmServer, reference: Reference, answer: Answer
) -> None:
    async with Client(server.drafts) as client, drafting(client, "bad", answer, 0.0):
        await check_texts(server, reference)


async def test_the_drafters_port_takes_no_requests(
    server: VllmServer, reference: Reference
) -> None:
    async with Client(server.drafts) as client:
        with pytest.raises(Exception, match="vLLM's own server takes the requests"):
            await client.tokens(TokenRequest(reference.prompts[0], 4))


async def test_a_worker_in_a_process_of_its_own_sends_no_features(server: VllmServer) -> None:
    async with (
        Client(server.drafts) as client,
        client.drafter("head", capabilities=[FEATURES], feature_request=FINAL) as drafter,
    ):
        assert list((await drafter.hear()).welcome.capabilities) == []


@pytest.mark.slow  # It starts another server.
async def test_features_of_vllms_server_are_the_targets_hidden_states() -> None:
    """On a CPU, vLLM computes in its engine core's process only if it is told to."""
    named = "OUTRIDER_VERIFIER_FEATURE_STATES=3,1"
    server = VllmServer("VLLM_ENABLE_V1_MULTIPROCESSING=0", named)
    try:
        await server.wait_ready()
        async with (
            Client(server.drafts) as client,
            client.drafter("head", capabilities=[FEATURES], feature_request=WANTED) as drafter,
        ):
            assert list((await drafter.hear()).welcome.capabilities) == [FEATURES]
            tokens, found = await asyncio.gather(server.complete(PROMPT), features(drafter))
        assert error(found, [*PROMPT, *tokens]) < 1e-3
    finally:
        server.process.stop(60)
        server.process.log.close()
