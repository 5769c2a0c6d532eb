"""Shared by every process of Outrider; imports no service."""

import os
import sys

# A worker of OpenMP that is out of work spins for some 16 ms before it sleeps; between two forwards verifier, drafters and gateway
# want its core. These rounds take 1 ms, longer than what lies between the loops of one forward. Read when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# What gRPC does around a fork is for children that go on with gRPC. Ours are always other programs, and one that was started while
# other threads were in gRPC crashed now and then before it could become one.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Of Hugging Face's libraries: progress bars write over one line again and again, which makes a mess of a log; and what an attempt
# failed of is said by us, once there is no further one. Read when the first of the libraries is imported.
if sys.stderr is None or not sys.stderr.isatty():
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")

__version__ = "0.1.0"
