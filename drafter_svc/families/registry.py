"""Finds families: Outrider's own, and families that other packages register.

A package registers a family as an entry point of the group `outrider.drafters`. A family that is
not registered is named `package.module:Class`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from outrider.errors import invalid

if TYPE_CHECKING:
    from drafter_svc.families.base import Family

GROUP = "outrider.drafters"
# These families are listed here and not as entry points, because sources that are not installed
# have no entry points. Help texts list their names.
BUILT_IN = {
    "ngram": "drafter_svc.families.ngram:NgramFamily",
    "suffix": "drafter_svc.families.suffix:SuffixFamily",
    "grammar": "drafter_svc.families.grammar:GrammarFamily",
    "model": "drafter_svc.families.model:ModelFamily",
    "head": "drafter_svc.families.head:HeadFamily",
}


def known_families() -> dict[str, str]:
    """Map the names of families to `package.module:Class`."""
    return {point.name: point.value for point in entry_points(group=GROUP)} | BUILT_IN


def find_family(name: str) -> type[Family]:
    """Return the class of a family, given its name or `package.module:Class`.

    Raises OutriderError(INVALID_VALUE) that lists the names, or says why the class cannot be
    imported.
    """
    # This import is not at the top, because the command line lists families without loading any.
    from drafter_svc.families.base import Family

    known = known_families()
    path = known.get(name, name)
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise invalid("family", f"must be {', '.join(known)} or package.module:Class, not {name!r}")
    if name not in known and os.getcwd() not in sys.path:
        # `python -m` puts the working directory on the path. With this line, `outrider serve` finds
        # the same families as the processes that it starts with `python -m`.
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as cause:
        raise invalid("family", f"{path} cannot be imported: {cause}") from cause
    if not (isinstance(found, type) and issubclass(found, Family)):
        raise invalid("family", f"{path} is no subclass of drafter_svc.families.base.Family")
    return found
