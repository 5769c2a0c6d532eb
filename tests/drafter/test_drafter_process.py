"""`python -m drafter_svc` as a process: what it loads and prints, its health, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, DiffLlamaConfig

from drafter_svc.__main__ import read_settings
from drafter_svc.families.registry import find_family, known_families
from outrider.process.network.ports import free_port
from outrider.tokenizer import fingerprint, load_tokenizer
from tests.drafter.counting_drafter import opened
from tests.drafter.drafter_process import ROOT, SERVING, drafter, health
from tests.drafter.scripted_drafts import READY, ScriptedVerifier

DRAFT = str(ROOT / "models/draft")
TEXT = [5, 6, 7, 8, 5, 6]


def has_torch(process_id: int) -> bool:
    return "libtorch" in Path(f"/proc/{process_id}/maps").read_text()


DRAFT_MODEL = ["--model", DRAFT, "--dtype", "float32", "--threads", "1"]
FAMILIES = [("ngram", []), pytest.param("model", DRAFT_MODEL, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("family", "flags"), FAMILIES)
async def test_it_registers_drafts_and_leaves_with_status_0(
    verifier: ScriptedVerifier, family: str, flags: list[str]
) -> None:
    verifier.serve(replace(READY, tokenizer_fingerprint=fingerprint(load_tokenizer(DRAFT))))
    port = free_port()
    places = ["--verifier", verifier.address, "--listen", f"127.0.0.1:{port}"]
    async with drafter("--family", family, "--id", "d1", *places, *flags) as process:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line.decode() == f"drafter d1 registered with {verifier.address}\n"
        stream = await verifier.accepted()
        assert stream.said.drafter_id == "d1"
        assert stream.said.family == find_family(family).name
        assert stream.said.placement.kind == "local"
        assert not stream.said.requires_grammar
        assert await health(port) == SERVING
        await stream.drafted(opened(1, TEXT))
        # Only the draft model loads torch.
        assert has_torch(process.pid) is (family == "model")
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert time.monotonic() - started < 2


async def test_a_drafter_of_grammars_says_that_it_requires_them(
    verifier: ScriptedVerifier,
) -> None:
    target = str(ROOT / "models/target")
    verifier.serve(replace(READY, tokenizer_fingerprint=fingerprint(load_tokenizer(target))))
    flags = ["--family", "grammar", "--target", target, "--verifier", verifier.address]
    async with drafter(*flags):
        stream = await asyncio.wait_for(verifier.accepted(), 60)
        assert stream.said.requires_grammar


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("", "family: must be given"),
        ("--family model", "model: must be given"),
        (
            "--family eagle",
            f"family must be {', '.join(known_families())} or package.module:Class, not 'eagle'",
        ),
        ("--family drafter_svc.nowhere:X", "cannot be imported: No module named"),
        ("--family outrider.drafter.session:X", "cannot be imported: module"),
        ("--family outrider.drafter.session:DraftSession", "DraftSession is no subclass of"),
        ("--family ngram --branches 2", "there is no setting --branches"),
        ("--family suffix --max-draft-len 2", "there is no setting --max-draft-len"),
        ("--family ngram --max-draft-len 65", "max-draft-len: must be less than or equal to 64"),
        (
            "--family ngram --verifier a:1 --verifier b:1 --uds /tmp/a",
            "uds: must name one socket for each verifier",
        ),
        (
            "--family ngram --verifier a:1,b:1 --verifier a:1",
            "verifier: names a:1 more than once",
        ),
        ("--family ngram --verifier a:1,,b:1", "verifier: must name host:port, with nothing empty"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    flags: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(flags.split(), "drafter")
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


async def test_a_setting_that_cannot_be_used_ends_it_with_a_sentence() -> None:
    async with drafter("--family", "ngram", "--redis", "redis://127.0.0.1") as process:
        _, error = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 1
        assert "pool-secret-file must be given with redis" in error.decode()
        assert "Traceback" not in error.decode()


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
    async with drafter("--family", "model", "--verifier", verifier.address, *flags) as process:
        output, error = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert b"registered" not in output
    assert b"Traceback" not in error
    # Warnings about this machine may come before the refusal.
    refusal = f"{tmp_path} cannot be served: layer 0 attends 2 times in a forward"
    assert error.decode().splitlines()[-1] == f"drafter: {refusal}"
