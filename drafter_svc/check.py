"""Checks a drafter's settings for `--check-config`, beyond their types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafter_svc.config import DrafterSettings
from drafter_svc.families.settings import RedisSettings
from drafter_svc.placement import plan
from drafter_svc.pools.keys import read_secret
from outrider.process.security.roles import Role
from outrider.process.settings.check_config import (
    check_address,
    check_certificate,
    check_file,
    check_model,
)


def check(settings: DrafterSettings) -> None:
    """Raise OutriderError that names a setting with which this machine or its files do not work."""
    for address in settings.verifier:
        check_address("verifier", address)
    check_address("listen", settings.listen)
    check_certificate("tls", settings.tls, Role.DRAFTER, Role.TRUSTED_DRAFTER)
    plan(settings.cores, settings.numa_node, settings.threads)
    for name in ("model", "target"):
        if model := getattr(settings, name, None):
            check_model(name, model)
    if head := getattr(settings, "head", None):
        check_file("head", Path(head) / "config.json")
    # A family's settings are mixed into the settings of every drafter.
    family: Any = settings
    if isinstance(family, RedisSettings) and family.redis_server() is not None:
        read_secret(family.pool_secret_file)
