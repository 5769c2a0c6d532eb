"""docs/observability.md describes every metric and span attribute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

import drafter_svc.metrics
import gateway.metrics
import verifier_svc.metrics
from outrider.process.observability.process_metrics import add_process_metrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/observability.md").read_text()
PROCESS = CollectorRegistry()
add_process_metrics(PROCESS, lambda: True, {})
REGISTRIES = {
    "every process": PROCESS,
    "gateway": gateway.metrics.GatewayMetrics().registry,
    "verifier": verifier_svc.metrics.VerifierMetrics("m").registry,
    "drafter": drafter_svc.metrics.DrafterMetrics("d", "ngram").registry,
}


@pytest.mark.parametrize("process", REGISTRIES)
def test_every_metric_is_documented(process: str) -> None:
    registry: CollectorRegistry = REGISTRIES[process]
    names = [family.name for family in registry.collect()]
    assert len(names) > 3
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_every_span_attribute_is_documented() -> None:
    """The test looks up our own attributes. The page lists OpenTelemetry's attributes together."""
    packages = ("outrider", "gateway", "verifier_svc", "drafter_svc")
    sources = [path.read_text() for package in packages for path in (ROOT / package).rglob("*.py")]
    attributes = {name for source in sources for name in re.findall(r"\b(outrider__\w+)=", source)}
    assert len(attributes) > 10
    assert [name for name in sorted(attributes) if f"`{name.replace('__', '.')}`" not in PAGE] == []
