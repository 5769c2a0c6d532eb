"""Makes the models beside the tests importable, keeps torch on one thread, and has Triton's kernels interpreted."""

import os
import sys
from pathlib import Path

import torch

# Read when the kernels' module is imported, which only happens on a GPU otherwise.
os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
