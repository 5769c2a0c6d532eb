"""The GPU kernel for penalties gives exactly the logits of torch's operators.

Runs on a GPU, or by Triton's interpreter on a CPU.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.protocol.messages import SamplingParams
from outrider.sampling import penalties, penalty_kernel
from outrider.sampling.context import Context
from outrider.sampling.logits import adjust

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab_size", [40, 1024, 1025, 5003])
def test_the_kernel_gives_the_bits_of_torchs_operators(
    vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(vocab_size)
    contexts = []
    for i in range(7):
        text = random.integers(0, min(vocab_size, 300), 60).tolist()
        drafted = random.integers(0, min(vocab_size, 300), i % 4).tolist()
        sampling = SamplingParams(
            repetition_penalty=[1.0, 0.3, 1.7][i % 3],
            frequency_penalty=[0.7, -1.1][i % 2],
            presence_penalty=[0.0, 0.9, -0.3][i % 3],
        )
        if i == 3:
            sampling = SamplingParams()
        contexts.append(Context(sampling, text, 20, drafted))
    rows = sum(context.row_count for context in contexts)
    logits = 8 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[:, ::7] = -torch.inf
    logits[:, 3::11] = 0.0
    logits[:, 4::11] = -0.0
    expected = adjust(logits, contexts)
    used = []

    def penalise(*args: torch.Tensor) -> None:
        used.append(True)
        honest(*args)

    honest = penalty_kernel.penalise
    monkeypatch.setattr(penalties, "triton_works", lambda device: True)
    monkeypatch.setattr(penalty_kernel, "penalise", penalise)
    found = adjust(logits.to(DEVICE), contexts).cpu()
    assert used
    # The numbers are compared as bits, because 0.0 equals -0.0.
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
