"""Metrics that every process has: whether it is ready, its build, certificates and resources."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

from outrider import __version__
from outrider.errors import OutriderError
from outrider.process.security.tls import Tls, expires_at


def add_process_metrics(
    registry: CollectorRegistry, is_ready: Callable[[], bool], tls: Mapping[str, Tls | None]
) -> None:
    """Add the metrics to a registry. Each process calls this once.

    `tls` maps the prefix of TLS settings' names to the files of these settings. `is_ready` may be
    called on any thread.
    """
    ProcessCollector(registry=registry)
    build = Gauge("outrider:build_info", "1, by version.", ["version"], registry=registry)
    build.labels(__version__).set(1)
    ready = Gauge("outrider:ready", "Whether the process serves.", registry=registry)
    ready.set_function(is_ready)
    expiry = Gauge(
        "outrider:certificate_expiry_timestamp_seconds",
        "When the first certificate of the file expires; NaN if it cannot be read.",
        ["setting"],
        registry=registry,
    )
    for name, files in tls.items():
        if files is not None:
            # The expiry is read with each scrape, since the files may be replaced.
            expiry.labels(f"{name}-cert").set_function(partial(_expiry, files.cert))


def _expiry(cert: Path) -> float:
    try:
        return expires_at(cert).timestamp()
    except OutriderError:
        return math.nan
