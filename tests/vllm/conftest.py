"""Stacks whose verifier computes with vLLM. `make vllm` installs vLLM in a separate environment.

A verifier with vLLM takes most of a minute to start, so all tests share one.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.stack import ROOT, TARGET, Stack, running

collect_ignore_glob = [] if find_spec("vllm") is not None else ["test_*.py"]

# vLLM's build for CPUs reads the size of its cache from here (GiB).
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
HEAD = str(ROOT / "models/heads/eagle3")
START_S = 240.0
FLAGS = (
    "--engine",
    "vllm",
    "--max-sequences",
    "16",
    "--engine-arg",
    "max_model_len=1024",
    "--engine-arg",
    "enforce_eager=true",
)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Yield vLLM's engine behind our verifier, with drafters.

    These are an n-gram drafter, a draft model, a head and a grammar drafter.
    """
    states = ("--feature-states", "1,3,5")  # the head reads them
    stack = Stack(*FLAGS, *states, "--engine-arg", "max_num_batched_tokens=256")
    stack.add_drafter("ngram-1", "ngram")
    stack.add_drafter("model-1", "model")
    stack.add_drafter("head-1", "head", "--head", HEAD, "--target", TARGET, "--threads", "1")
    stack.add_drafter("grammar-1", "grammar", "--target", TARGET)
    with running(stack, START_S):
        yield stack


@pytest.fixture(scope="session")
def native() -> Iterator[Stack]:
    """Yield the native engine in float32, where torch's path and the C kernels give equal texts."""
    stack = Stack("--page-count", "256")
    with running(stack):
        yield stack
