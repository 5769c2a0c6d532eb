"""A real stack for all end-to-end tests: a verifier and two drafters, each in its own process."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from stack import Stack, running


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """A stack with default settings. Whether drafts pay on this machine, it finds out itself."""
    stack = Stack()
    stack.add_drafter("ngram-1", "ngram")
    stack.add_drafter("model-1", "model")
    with running(stack):
        yield stack
