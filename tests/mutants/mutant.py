"""A bug that `python -m tests.mutants` plants."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One bug: `old` becomes `new` in the file `path`, in which `old` occurs exactly once."""

    name: str
    what: str
    """The bug in words."""
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Tests that should notice the bug; tests marked slow are not run."""

    def applied(self, source: str) -> str:
        """Return the source with the bug in it.

        Raises ValueError unless `old` occurs exactly once.
        """
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"mutant {self.name}: {self.path} has {count} times {self.old!r}")
        return source.replace(self.old, self.new)
