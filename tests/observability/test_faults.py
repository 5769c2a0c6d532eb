"""Faults of a real stack make their alerts fire in a real Prometheus that has the shipped rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from outrider.process.network.ports import free_port
from tests.observability.prometheus_server import prometheus
from tests.stack import GatewayProcess, Stack, behind_gateway
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

REQUEST = {"prompt": "x", "max_tokens": 4}


def firing(url: str) -> set[str]:
    """Return the alerts that fire; none while Prometheus starts."""
    try:
        answer = httpx.get(f"{url}/api/v1/alerts")
    except httpx.TransportError:
        return set()
    if answer.is_error:
        return set()
    alerts = answer.json()["data"]["alerts"]
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def value(url: str, query: str) -> float | None:
    """Return the value of a query with one result."""
    try:
        answer = httpx.get(f"{url}/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return None
    if answer.is_error:
        return None
    found = answer.json()["data"]["result"]
    return float(found[0]["value"][1]) if found else None


def test_alerts_fire_when_their_faults_are_provoked(tmp_path: Path) -> None:
    verifier_port, drafter_port = free_port(), free_port()
    stack = Stack("--metrics-port", str(verifier_port))
    stack.add_drafter("d", "ngram", "--metrics-port", str(drafter_port))
    with behind_gateway(stack) as gateway:
        targets = {"gateway": [gateway.port], "verifier": [verifier_port]}
        targets["drafter"] = [drafter_port]
        with prometheus(tmp_path, targets, at_once=True) as url:
            provoke(url, stack, gateway)


def provoke(url: str, stack: Stack, gateway: GatewayProcess) -> None:
    """Break the stack in several ways, and wait each time for the alerts."""

    def fires(*alerts: str) -> Callable[[], bool]:
        return lambda: firing(url) >= set(alerts)

    wait_until(lambda: value(url, "sum(outrider:ready)") == 3.0)
    assert httpx.post(f"{gateway.url}/v1/completions", json=REQUEST, timeout=60).is_success
    # A drafter on trial may be paused at first.
    assert firing(url) <= {"OutriderDraftingPaused"}
    stack.drafters["d"].kill()
    wait_until(fires("OutriderTargetDown", "OutriderDegraded", "OutriderDrafterLost"))
    assert value(url, "outrider:drafters_lost") == 1.0
    stack.verifier.kill()
    wait_until(lambda: httpx.get(f"{gateway.url}/readyz", timeout=60).status_code == 503)
    for _ in range(20):
        httpx.post(f"{gateway.url}/v1/completions", json=REQUEST, timeout=60)
    wait_until(fires("OutriderGatewayNotReady", "OutriderErrors"))
    stack.drafters["d"].start()
    wait_until(fires("OutriderDrafterNotRegistered"))
    # The alert must fire while the verifier loads, which takes seconds.
    stack.verifier.start()
    wait_until(fires("OutriderVerifierNotReady"))
    gone = {"OutriderTargetDown", "OutriderGatewayNotReady", "OutriderVerifierNotReady"}
    gone |= {"OutriderDrafterNotRegistered", "OutriderDegraded", "OutriderDrafterLost"}
    wait_until(lambda: value(url, "sum(outrider:ready)") == 3.0 and not firing(url) & gone)
