"""What every process of Outrider shares. Imports no service."""

import os
import sys

# An idle OpenMP worker spins for about 16 ms before it sleeps, but other processes need its core
# between two forwards. These rounds take about 1 ms, which is longer than the gap between two loops
# of one forward. OpenMP reads the variable when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

# gRPC's fork handlers serve children that keep using gRPC. Our children always become other
# programs, and with the handlers some crashed before exec while other threads were inside gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Hugging Face's progress bars redraw one line, which fills a log. Its warnings of failed attempts
# are redundant, since we report the last failure. The libraries read both on their first import.
if sys.stderr is None or not sys.stderr.isatty():
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")

__version__ = "0.1.0"
