"""The versions of vLLM whose private parts are known to be as this package expects them."""

from __future__ import annotations

from outrider.errors import invalid

SUPPORTED = ("0.32", "0.33")
"""Minor versions. Tests run with the first. Of the other, only the code that we use was read."""


def check_version(version: str) -> None:
    """Raise OutriderError(INVALID_VALUE) unless the version of vLLM is supported."""
    minor = ".".join(version.split(".")[:2])
    if minor not in SUPPORTED:
        known = " and ".join(SUPPORTED)
        raise invalid("vllm", f"has version {version}; install one of the versions {known}")
