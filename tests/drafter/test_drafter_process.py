"""`python -m drafter_svc` as a process: what it loads and prints, its health, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import scripted_drafts
from counting_drafter import opened
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_drafts import READY, ScriptedVerifier
from transformers import AutoModelForCausalLM, DiffLlamaConfig

from drafter_svc.families.registry import find_family, known_families
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.process import rpc
from outrider.process.ports import free_port
from outrider.protocol.draft_messages import Closed, DraftBatch, Skip, StepBatch
from outrider.protocol.messages import DraftDistribution, SamplingParams
from outrider.tokenizer import fingerprint, load_tokenizer
from outrider.v1 import drafts_pb2, verifier_pb2

ROOT = Path(__file__).parents[2]
DRAFT = str(ROOT / "models/draft")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
TEXT = [5, 6, 7, 8, 5, 6]


@asynccontextmanager
async def drafter(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A drafter process, which is killed at the end."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "drafter_svc", *flags, cwd=ROOT, env=environment, stdout=-1, stderr=-1
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def health(port: int) -> int:
    async with rpc.dial(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        response = await check(
            health_pb2.HealthCheckRequest(service="outrider.v1.Drafter"),
            wait_for_ready=True,
            timeout=10,
        )
        status: int = response.status
        return status


def has_torch(process_id: int) -> bool:
    return "libtorch" in Path(f"/proc/{process_id}/maps").read_text()


DRAFT_MODEL = ["--model", DRAFT, "--dtype", "float32", "--threads", "1"]
REPEAT = "examples.repeat_drafter:RepeatFamily"
FAMILIES = [
    ("ngram", []),
    (REPEAT, ["--match-tokens", "1"]),
    pytest.param("model", DRAFT_MODEL, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "flags"), FAMILIES)
async def test_it_registers_drafts_and_leaves_with_status_0(
    verifier: ScriptedVerifier, monkeypatch: pytest.MonkeyPatch, family: str, flags: list[str]
) -> None:
    monkeypatch.setattr(scripted_drafts, "FINGERPRINT", fingerprint(load_tokenizer(DRAFT)))
    verifier.info = replace(READY, tokenizer_fingerprint=scripted_drafts.FINGERPRINT)
    address = f"127.0.0.1:{verifier.port}"
    port = free_port()
    places = ["--verifier", address, "--listen", f"127.0.0.1:{port}"]
    async with drafter("--family", family, "--id", "d1", *places, *flags) as process:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line.decode() == f"drafter d1 registered with {address}\n"
        stream = await verifier.accepted()
        assert stream.hello.drafter_id == "d1"
        assert stream.hello.family == find_family(family).name
        assert stream.hello.placement.kind == "local"
        assert await health(port) == SERVING
        stream.send(StepBatch(opened=[opened(1, TEXT)]))
        drafts = await stream.receive()
        assert isinstance(drafts, DraftBatch)
        assert len(drafts.proposals) == 1
        # Only the draft model loads torch.
        assert has_torch(process.pid) is (family == "model")
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert time.monotonic() - started < 2


def senseless() -> list[StepBatch | bytes]:
    """Bytes that are no message, values of later versions, and a token that the target lacks."""
    later_distribution = drafts_pb2.Opened(distribution=77)  # type: ignore[arg-type]
    later_reason = drafts_pb2.Closed(reason=99)  # type: ignore[arg-type]
    steps = [
        drafts_pb2.StepBatch(opened=[later_distribution]),
        drafts_pb2.StepBatch(closed=[later_reason]),
    ]
    responses = [verifier_pb2.StreamDraftsResponse(step=step) for step in steps]
    return [
        b"\xff" * 30,
        b"",
        *[response.SerializeToString() for response in responses],
        StepBatch(opened=[opened(1, [5000])]),
    ]


async def test_no_message_ends_the_process(verifier: ScriptedVerifier) -> None:
    later_stage = verifier_pb2.GetModelResponse(stage=77)  # type: ignore[arg-type]
    verifier.answers = [b"\xff" * 30, later_stage.SerializeToString()]
    address = f"127.0.0.1:{verifier.port}"
    async with drafter("--family", "ngram", "--id", "d1", "--verifier", address) as process:
        stream = await verifier.accepted()
        for message in senseless():
            stream.send(message)
            stream.send(StepBatch(opened=[opened(2, TEXT)]))
            drafts = asyncio.ensure_future(stream.received.get())
            accepted = asyncio.ensure_future(verifier.streams.get())
            await asyncio.wait([drafts, accepted], timeout=20, return_when=asyncio.FIRST_COMPLETED)
            if not drafts.done():
                stream = accepted.result()
                stream.send(StepBatch(opened=[opened(2, TEXT)]))
                assert isinstance(await stream.receive(), DraftBatch)
            drafts.cancel()
            accepted.cancel()
            stream.send(StepBatch(closed=[Closed(2)]))
        assert process.returncode is None


@pytest.mark.slow
@pytest.mark.parametrize("distribution", list(DraftDistribution))
async def test_a_request_that_forbids_every_token_ends_no_drafter(
    verifier: ScriptedVerifier, monkeypatch: pytest.MonkeyPatch, distribution: DraftDistribution
) -> None:
    tokenizer = load_tokenizer(DRAFT)
    monkeypatch.setattr(scripted_drafts, "FINGERPRINT", fingerprint(tokenizer))
    verifier.info = replace(READY, tokenizer_fingerprint=scripted_drafts.FINGERPRINT)
    bans = tuple(
        token for token in range(tokenizer.get_vocab_size()) if tokenizer.decode([token])[:1] == "y"
    )
    seed = 1 if distribution is DraftDistribution.COUPLED else None
    impossible = replace(
        opened(1, TEXT),
        sampling=SamplingParams(1.0, seed=seed, banned_token_ids=bans),
        distribution=distribution,
        grammar=Grammar(GrammarKind.CHOICE, choices=("yes",)),
        prompt_length=6,
    )
    async with drafter(
        "--family", "model", "--verifier", f"127.0.0.1:{verifier.port}", *DRAFT_MODEL
    ) as process:
        stream = await asyncio.wait_for(verifier.streams.get(), 60)
        stream.send(StepBatch(opened=[impossible]))
        assert await asyncio.wait_for(stream.received.get(), 30) == DraftBatch(skips=[Skip(1, 6)])
        stream.send(StepBatch(opened=[opened(2, TEXT)]))
        batch = await asyncio.wait_for(stream.received.get(), 30)
        assert isinstance(batch, DraftBatch)
        assert [proposal.sequence_id for proposal in batch.proposals] == [2]
        assert process.returncode is None


async def test_it_is_not_serving_until_a_verifier_has_it(verifier: ScriptedVerifier) -> None:
    port = free_port()
    await verifier.stop()
    places = ["--verifier", f"127.0.0.1:{verifier.port}", "--listen", f"127.0.0.1:{port}"]
    async with drafter("--family", "ngram", *places):
        assert await health(port) == NOT_SERVING
        await verifier.start()
        await verifier.accepted()
        deadline = time.monotonic() + 30
        while await health(port) != SERVING:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("flags", "status", "named"),
    [
        (["--family", "model"], 2, "model: must be given"),
        ([], 2, "family: must be given"),
        (
            ["--family", "eagle"],
            2,
            f"family must be {', '.join(known_families())} or package.module:Class, not 'eagle'",
        ),
        (
            ["--family", "drafter_svc.nowhere:X"],
            2,
            "family drafter_svc.nowhere:X cannot be imported: No module named",
        ),
        (
            ["--family", "outrider.drafter.session:X"],
            2,
            "family outrider.drafter.session:X cannot be imported: module",
        ),
        (
            ["--family", "outrider.drafter.session:DraftSession"],
            2,
            "DraftSession is no subclass of",
        ),
        (["--family", "ngram", "--branches", "2"], 2, "there is no setting --branches"),
        (["--family", "suffix", "--max-draft-len", "2"], 2, "there is no setting --max-draft-len"),
        (["--max-draft-len", "2"], 2, "family: must be given"),
        (
            ["--family", "ngram", "--max-draft-len", "65"],
            2,
            "max-draft-len: must be less than or equal to 64",
        ),
        (
            ["--family", "ngram", "--redis", "redis://127.0.0.1"],
            1,
            "pool-secret-file must be given with redis",
        ),
        (
            ["--family", "ngram", "--redis", "redis+ring://127.0.0.1"],
            1,
            "redis must look like redis://HOST:PORT/DB",
        ),
        (
            ["--family", "ngram", "--redis", "redis://u@h", "--redis-password-file", "none"],
            1,
            "redis-password-file none cannot be read",
        ),
        (
            ["--family", "ngram", "--redis", "rediss://h", "--redis-ca-file", "none"],
            1,
            "redis-ca-file none is no file of PEM",
        ),
        (["--family", "ngram", "--namespace", "{a}"], 2, "namespace: String should match pattern"),
        (["--family", "ngram", "--listen", "nowhere:1:2"], 1, "cannot listen on nowhere:1:2"),
        (["--family", "ngram", "--cores", "0-x"], 1, "cores"),
    ],
)
async def test_bad_settings_end_it_with_a_sentence_that_names_them(
    flags: list[str], status: int, named: str
) -> None:
    async with drafter(*flags) as process:
        _, error = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == status
        assert named in error.decode()
        assert "Traceback" not in error.decode()


@pytest.mark.slow
async def test_another_tokenizer_ends_it_with_both_fingerprints(verifier: ScriptedVerifier) -> None:
    async with drafter(
        "--family", "model", "--model", DRAFT, "--verifier", f"127.0.0.1:{verifier.port}"
    ) as process:
        _, error = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 1
        assert fingerprint(load_tokenizer(DRAFT)) in error.decode()
        assert scripted_drafts.FINGERPRINT in error.decode()


@pytest.mark.slow  # a process that loads torch
async def test_a_draft_model_whose_forwards_differ_ends_it_with_a_sentence(
    verifier: ScriptedVerifier, tmp_path: Path
) -> None:
    config = DiffLlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    flags = ["--model", str(tmp_path), "--dtype", "float32", "--threads", "1"]
    address = f"127.0.0.1:{verifier.port}"
    async with drafter("--family", "model", "--verifier", address, *flags) as process:
        output, error = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert b"registered" not in output
    assert b"Traceback" not in error
    # Warnings about this machine may come before it.
    refusal = f"{tmp_path} cannot be served: layer 0 attends 2 times in a forward"
    assert error.decode().splitlines()[-1] == f"drafter: {refusal}"
