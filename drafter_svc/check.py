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


def check_int8(settings: Any, *, on_cpu: bool = False) -> None:
    """Raise OutriderError(INVALID_VALUE) for weights in int8 that the family could not load.

    With `on_cpu` the drafter computes on the CPU, whatever `settings.device` is.
    """
    if getattr(settings, "weights", None) != "int8":
        return
    # The two modules load torch, which takes seconds.
    from outrider.lm.cpu.weights import dtype_for_int8
    from outrider.lm.devices import find_device

    dtype_for_int8(settings.dtype, find_device("cpu" if on_cpu else settings.device))


def check(settings: DrafterSettings) -> None:
    """Raise OutriderError if a setting does not suit this machine or its files.

    The error names the setting.
    """
    for address in settings.verifier:
        check_address("verifier", address)
    check_address("listen", settings.listen)
    check_certificate("tls", settings.tls, Role.DRAFTER, Role.TRUSTED_DRAFTER)
    place = plan(settings.cores, settings.numa_node, settings.threads)
    check_int8(settings, on_cpu=place.kind != "local")
    for name in ("model", "target"):
        if model := getattr(settings, name, None):
            check_model(name, model)
    if head := getattr(settings, "head", None):
        check_file("head", Path(head) / "config.json")
    # `settings` also has the family's own settings, which its declared type does not show.
    family: Any = settings
    if isinstance(family, RedisSettings) and family.redis_server() is not None:
        read_secret(family.pool_secret_file)
