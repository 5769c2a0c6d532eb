"""What libraries ask for once, when they are imported, whoever imports them first.

Without a GPU Triton interprets its kernels. And gRPC leaves forks alone, as `outrider` has it for those who import that first.
"""

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# A busy machine takes long over some example or other; that says nothing of what is tested.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
