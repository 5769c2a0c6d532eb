"""Makes the helper modules of these tests importable, and runs torch on one thread."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `recorded_graphs.Capture` in place of CUDA graphs, with a plain attention kernel."""
    from recorded_graphs import Capture
    from reference_kernel import paged_attention

    from outrider.lm import attention
    from outrider.lm.gpu import graphs, triton_attention

    made = Capture()
    monkeypatch.setattr(graphs, "_CudaCapture", lambda: made)
    monkeypatch.setattr(attention.LayerCache, "supports_kernel", lambda self, device: True)
    monkeypatch.setattr(triton_attention, "paged_attention", paged_attention)
    return made
