"""The names of the parts of a campaign's stack, and the parts that this machine cannot run."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

from outrider_bench.experiment.spec import Drafter

VERIFIERS = ("verifier-1", "verifier-2")
GATEWAYS = ("gateway-1", "gateway-2")
DRAFTERS = {
    "ngram": Drafter.model_validate({"family": "ngram"}),
    "model": Drafter.model_validate({"family": "model", "threads": 1}),
    "suffix": Drafter.model_validate({"family": "suffix"}),
}
REDIS = ("redis", "link-redis")
"""The Redis of the n-gram and suffix drafters, and the link to it."""
ALL_VERIFIERS = "verifiers"
"""The target of a fault that hits both verifiers at once."""


def absent() -> frozenset[str]:
    """Return the parts whose program or package is missing here."""
    found: set[str] = set()
    if shutil.which("redis-server") is None:
        found.update(REDIS)
    if find_spec("arctic_inference") is None:
        found.update(("suffix", "link-suffix"))
    return frozenset(found)


def touched(target: str) -> frozenset[str]:
    """Return the processes or links that a fault of this target hits."""
    return frozenset(VERIFIERS if target == ALL_VERIFIERS else (target,))


def unreachable(target: str) -> list[str]:
    """Return the verifiers that a fault of this target may put out of reach while it lasts."""
    through = {"link-1": "verifier-1", "link-2": "verifier-2"}
    names = {through.get(name, name) for name in touched(target)}
    return sorted(names.intersection(VERIFIERS))
