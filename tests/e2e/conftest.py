"""A real stack that many end-to-end tests share: a verifier and three drafters as processes."""

from collections.abc import Iterator

import pytest

from tests.stack import TARGET, Stack, running


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Yield a stack with default settings.

    The verifier finds out whether drafts pay on this machine.
    """
    stack = Stack("--model-name", TARGET, "--model-name", "a further name")
    stack.add_drafter("ngram-1", "ngram")
    stack.add_drafter("model-1", "model")
    stack.add_drafter("grammar-1", "grammar", "--target", TARGET)
    with running(stack):
        yield stack
