"""Which families there are: those that come with Outrider, and those that other packages register.

A package registers a family as an entry point of the group `outrider.drafters`. One that is not registered is named
`package.module:Class`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import entry_points

from drafter_svc.families.base import Family
from outrider.errors import invalid

GROUP = "outrider.drafters"
# No entry points, so that they are found in sources that were not installed as well.
_BUILT_IN = {
    "ngram": "drafter_svc.families.ngram:NgramFamily",
    "suffix": "drafter_svc.families.suffix:SuffixFamily",
    "model": "drafter_svc.families.model:ModelFamily",
}


def known_families() -> dict[str, str]:
    """`package.module:Class` of each family that has a name."""
    return {point.name: point.value for point in entry_points(group=GROUP)} | _BUILT_IN


def find_family(name: str) -> type[Family]:
    """The family of that name, or the class itself for `package.module:Class`.

    Raises OutriderError(INVALID_VALUE) that says what there is, or why the class cannot be had.
    """
    known = known_families()
    path = known.get(name, name)
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise invalid("family", f"must be {', '.join(known)} or package.module:Class, not {name!r}")
    if name not in known and os.getcwd() not in sys.path:
        # As for `python -m`, so that `outrider serve` finds the same families.
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as cause:
        raise invalid("family", f"{path} cannot be imported: {cause}") from cause
    if not (isinstance(found, type) and issubclass(found, Family)):
        raise invalid("family", f"{path} is no class derived from drafter_svc.families.base.Family")
    return found
