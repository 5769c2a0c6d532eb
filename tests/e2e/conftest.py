"""Real stacks for all end-to-end tests: a verifier and two drafters, each in its own process."""

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
    """A stack with default settings."""
    with _with_both_drafters() as stack:
        yield stack


@pytest.fixture(scope="session")
def always_drafting() -> Iterator[Stack]:
    """A stack that waits for every draft, whether it pays on this machine or not."""
    with _with_both_drafters("--always-draft") as stack:
        yield stack


@contextmanager
def _with_both_drafters(*verifier_flags: str) -> Iterator[Stack]:
    stack = Stack(*verifier_flags)
    stack.add_drafter("ngram-1", "ngram")
    stack.add_drafter("model-1", "model")
    with running(stack):
        yield stack
