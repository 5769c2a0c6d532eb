"""A bug that `python -m tests.mutants` plants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` occurs exactly once in `path`. `tests` concern it and are quick; of those marked slow none runs.

    `equivalent` says why no test can notice it.
    """

    name: str
    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def applied(self, source: str) -> str:
        """The source with the bug in it; raises ValueError unless there is exactly one place for it."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"mutant {self.name}: {count} places in {self.path} have {self.old!r}")
        return source.replace(self.old, self.new)
