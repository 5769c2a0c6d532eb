"""The Go drafter with a Medusa head, built from this tree, keeps the contract and drafts."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from outrider.conformance.kit import HIDDEN_SIZE, Kit
from outrider.conformance.rules import Outcome
from outrider.protocol.messages import SamplingParams, SpeculationOptions
from tests.stack import TARGET, Client, Process, Stack, prompts, running

GO = Path(__file__).parents[2] / "clients/go"
TOOLS = ["go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"]
HEADS = 3


@pytest.fixture(scope="module")
def program() -> str:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}, which clients/install.sh installs")
    subprocess.run([GO / "build.sh"], check=True, timeout=300)
    return str(GO / "build/medusa")


def write_head(
    folder: Path, block: tuple[torch.Tensor, torch.Tensor], outputs: list[torch.Tensor]
) -> Path:
    """Write Medusa heads.

    All heads have this block; each head has its own matrix of `outputs` for scores.
    """
    tensors: dict[str, torch.Tensor] = {}
    for i, output in enumerate(outputs):
        tensors[f"{i}.0.linear.weight"] = block[0].clone()
        tensors[f"{i}.0.linear.bias"] = block[1].clone()
        tensors[f"{i}.1.weight"] = output.contiguous()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {"medusa_num_heads": len(outputs), "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"


@torch.inference_mode()
def write_fitted_head(folder: Path) -> Path:
    """Write heads of the bundled target: least-squares fits that predict later tokens' states."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    width = model.config.hidden_size
    torch.manual_seed(1)
    block = torch.randn(width, width) / width, torch.randn(width) / 10
    # Each head's inputs over all texts, and the states that it should compute from them.
    inputs: list[list[torch.Tensor]] = [[] for _ in range(HEADS)]
    wanted: list[list[torch.Tensor]] = [[] for _ in range(HEADS)]
    for text in prompts()[:24]:
        states = model.model(torch.tensor([text])).last_hidden_state[0]
        read = states + torch.nn.functional.silu(states @ block[0].T + block[1])
        for i in range(HEADS):
            inputs[i].append(read[: -1 - i])
            wanted[i].append(states[1 + i :])
    outputs = []
    for i in range(HEADS):
        x, y = torch.cat(inputs[i]), torch.cat(wanted[i])
        # The ridge keeps the fit from learning these few texts by heart.
        fitted = torch.linalg.solve(x.T @ x + 10.0 * torch.eye(width), x.T @ y)
        outputs.append(model.lm_head.weight @ fitted.T)
    return write_head(folder, block, outputs)


@pytest.mark.slow
def test_it_passes_the_conformance_kit(program: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    block = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE).bfloat16(), torch.randn(HIDDEN_SIZE).bfloat16()
    outputs = [torch.randn(4096, HIDDEN_SIZE).bfloat16() for _ in range(HEADS)]
    head = write_head(tmp_path, block, outputs)
    kit = Kit([program, str(head), "{address}"], "f" * 64, 4096)
    asyncio.run(kit.run())
    assert [(name, kit.results[name].reason) for name in kit.failed] == []
    assert kit.results["features"].outcome is Outcome.PASS


@pytest.mark.slow
async def test_its_guesses_are_those_of_the_built_in_family(program: str, tmp_path: Path) -> None:
    head = write_fitted_head(tmp_path)
    stack = Stack("--always-draft", "--draft-tokens", "fixed:3", "--no-draft-trees")
    stack.add_drafter("head-1", "head", "--head", str(tmp_path), "--target", TARGET)
    with running(stack), Process("", command=[program, str(head), stack.address]):
        async with Client(stack.address) as client:
            await client.connected("go-medusa")
            plain, own, built_in = [
                await client.answers(prompts()[:12], SamplingParams(0.0), options)
                for options in (
                    SpeculationOptions(enabled=False),
                    SpeculationOptions(drafter_family="go-medusa"),
                    SpeculationOptions(drafter_id="head-1"),
                )
            ]
    assert own.texts == built_in.texts == plain.texts
    assert own.accepted_token_count > 50
    assert own.acceptance_rate == pytest.approx(built_in.acceptance_rate, abs=0.02)


@pytest.mark.slow
async def test_it_stops_at_a_verifier_of_another_width(program: str, tmp_path: Path) -> None:
    block = torch.zeros(8, 8), torch.zeros(8)
    head = write_head(tmp_path, block, [torch.zeros(10, 8)])
    with (
        running(Stack()) as stack,
        Process("", command=[program, str(head), stack.address]) as drafter,
    ):
        assert await asyncio.to_thread(drafter.popen.wait, 30) == 1
        assert "the verifier's features have 384 numbers, not 8" in drafter.output()
