"""Real stacks for all end-to-end tests: a verifier and both kinds of drafter, each a process of its own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from stack import Stack, running  # lies beside this file


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    with _with_both_drafters() as stack:
        yield stack


@pytest.fixture(scope="session")
def always_drafting() -> Iterator[Stack]:
    """Every draft is waited for, since whether they pay on a busy machine is not what is tested."""
    with _with_both_drafters("--always-draft") as stack:
        yield stack


@contextmanager
def _with_both_drafters(*verifier_flags: str) -> Iterator[Stack]:
    stack = Stack(*verifier_flags)
    stack.add_drafter("ngram-1", "ngram")
    stack.add_drafter("model-1", "model")
    with running(stack):
        yield stack
