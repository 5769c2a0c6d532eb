"""Records operators instead of capturing CUDA graphs."""

from typing import Any

import pytest


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a `recorded_graphs.Capture` in place of CUDA graphs, and set a plain attention kernel."""
    from outrider.lm import attention
    from outrider.lm.gpu import graphs, triton_attention
    from tests.lm.recorded_graphs import Capture
    from tests.lm.reference_kernel import paged_attention

    made = Capture()
    monkeypatch.setattr(graphs, "_CudaCapture", lambda: made)
    monkeypatch.setattr(attention.LayerCache, "supports_kernel", lambda self, device: True)
    monkeypatch.setattr(triton_attention, "paged_attention", paged_attention)
    return made
