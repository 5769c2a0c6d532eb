"""Limits each test process to one core."""

import torch

torch.set_num_threads(1)
