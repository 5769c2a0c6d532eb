"""Without a GPU Triton interprets its kernels, whoever imports it first: it asks for that once, when it is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
