"""Sets environment variables that libraries read once, and ends a process without teardown.

`outrider` imports this module before anything else, so that the variables are set before torch,
gRPC or Hugging Face's libraries are loaded. No other module sets an environment variable when it is
imported. A variable that the caller has set keeps its value.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def _set_defaults() -> None:
    # An idle OpenMP worker spins by default for some 16 ms before it sleeps. But between two
    # forwards, the verifier, the drafters and the gateway need the worker's core. 20,000 spins take
    # 1 ms, which is longer than the gap between two loops of one forward.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    # gRPC's fork handlers serve children that go on using gRPC. A process of Outrider that uses
    # gRPC starts only other programs. With the handlers, a child that was forked while other
    # threads were inside gRPC sometimes crashed before it could start its program.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # By default, gRPC's core writes each failed handshake to standard error, in its own format.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Torch allocates weights and caches in huge pages. With small pages, a CPU that reads a whole
    # model for each token spends much of its time in address translation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # A progress bar rewrites its line, which fills a log file with fragments.
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Outrider logs a failed download itself, after the last attempt.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")


_set_defaults()


def exit_now() -> NoReturn:
    """Flush logs and standard streams, and exit with 0 without the interpreter's teardown.

    During teardown a library that torch loads would print a hundred lines about leaked objects.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
