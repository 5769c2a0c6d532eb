"""Makes the fakes beside the tests importable, and limits each test process to one core."""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))
