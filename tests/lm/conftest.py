"""Makes the models beside the tests importable, keeps torch on one thread; without a GPU Triton's kernels are interpreted."""

import os
import sys
from pathlib import Path

import torch

# Read when the kernels' modules are imported, which only happens on a GPU otherwise.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
