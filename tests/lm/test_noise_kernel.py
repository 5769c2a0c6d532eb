"""The GPU kernel for coupled noise draws the tokens that torch's operators draw.

Runs on a GPU, or by Triton's interpreter on a CPU.
"""

from __future__ import annotations

import logging
import subprocess
from typing import Any

import numpy as np
import pytest
import torch

from outrider.sampling import noise_kernel, tensors
from outrider.sampling.noise import coupled_keys
from outrider.sampling.sampler import coupled_sample

kernel_problem = tensors.kernel_problem
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab_size", [16, 1000, 1024, 1025, 5003])
def test_the_kernel_draws_the_same_tokens_as_torch(vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    probs = (4 * torch.randn(40, vocab_size)).softmax(-1)
    probs[torch.rand_like(probs) < 0.3] = 0.0
    keys = torch.from_numpy(coupled_keys(np.arange(40) * 2**59, np.arange(40)))
    drawn = noise_kernel.coupled_sample(probs.to(DEVICE), keys.to(DEVICE))
    assert drawn.tolist() == coupled_sample(probs, keys).tolist()
    assert len(set(drawn.tolist())) > 5


def test_a_token_of_probability_0_is_never_drawn() -> None:
    probs = torch.zeros(64, 3000)
    probs[torch.arange(64), torch.arange(64) * 41] = 1e-30
    drawn = noise_kernel.coupled_sample(probs.to(DEVICE), torch.arange(64, device=DEVICE))
    assert drawn.tolist() == [41 * i for i in range(64)]


# Keys for which token 5 has the smallest and the largest possible noise (docs/protocol.md).
EDGES = [0x4AB325A704411782, 0x1A4D2A56FEACC542]


@pytest.mark.parametrize("key", EDGES)
def test_extreme_noise_never_draws_a_token_of_probability_0(key: int) -> None:
    keys = torch.tensor([key, key])
    probs = torch.full((2, 8), 1 / 7)
    probs[0, 5] = 0.0
    probs[1] = torch.eye(8)[5]
    drawn = noise_kernel.coupled_sample(probs.to(DEVICE), keys.to(DEVICE)).tolist()
    assert drawn == coupled_sample(probs, keys).tolist()
    assert drawn[0] != 5
    assert drawn[1] == 5


def test_a_row_of_nans_gives_a_token_of_the_vocabulary() -> None:
    probs = torch.full((4, 1500), torch.nan, device=DEVICE)
    assert max(noise_kernel.coupled_sample(probs, torch.arange(4, device=DEVICE)).tolist()) < 1500


def test_where_a_kernel_runs_triton_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tensors.kernel_problem(torch.device(DEVICE)) is None
    monkeypatch.setattr(noise_kernel, "coupled_sample", lambda probs, keys: keys + 1)
    problem = tensors.kernel_problem(torch.device(DEVICE))
    assert problem == "Triton kernels give wrong results (1 in place of 0)"


def test_where_a_kernel_cannot_be_built_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(probs: Any, keys: Any) -> Any:
        raise subprocess.CalledProcessError(1, ["gcc", "main.c"])

    monkeypatch.setattr(noise_kernel, "coupled_sample", failing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(tensors, "kernel_problem", lambda _: kernel_problem(torch.device(DEVICE)))
    with caplog.at_level(logging.WARNING):
        assert not tensors.triton_works.__wrapped__(torch.device("cuda"))
    assert "Triton kernels do not run (CalledProcessError: Command '['gcc'" in caplog.text


def test_a_device_that_failed_is_not_taken_for_a_missing_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(probs: Any, keys: Any) -> Any:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(noise_kernel, "coupled_sample", failing)
    with pytest.raises(torch.AcceleratorError):
        tensors.kernel_problem(torch.device(DEVICE))
