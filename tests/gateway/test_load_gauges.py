"""Endpoint pickers read the verifiers' load at the gateway, under vLLM's names."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.protocol.model_info import Load
from tests.gateway.mortal_verifiers import Site
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def gauges(http: httpx.AsyncClient) -> dict[str, float]:
    """Return those gauges of the only model that have vLLM's names."""
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    samples = [each for family in families if family.type == "gauge" for each in family.samples]
    found = [each for each in samples if each.name.startswith("vllm:")]
    assert all(each.labels == {"model_name": "models/target"} for each in found)
    return {each.name.removeprefix("vllm:"): each.value for each in found}


async def reports(site: Site, *loads: Load | None) -> None:
    """Let the two verifiers report these loads, and wait until the gateway knows them."""
    for verifier, load in zip((site.first, site.second), loads, strict=True):
        verifier.script.info = replace(verifier.script.info, load=load)
    replicas = site.gateway.router.replicas
    await until(lambda: [each.info and each.info.load for each in replicas] == list(loads))


async def test_they_are_those_of_the_verifiers_that_take_requests(site: Site) -> None:
    await reports(site, Load(3, 2, 64, 1024, kv_cache_usage=0.5), Load(4, 0, 64, 1024))
    assert await gauges(site.http) == {
        "num_requests_running": 7,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "gpu_cache_usage_perc": 0.25,
    }
    await site.second.kill()
    await site.known_lost(1)
    assert (await gauges(site.http))["kv_cache_usage_perc"] == 0.5


async def test_a_verifier_that_reports_no_load_has_none(site: Site) -> None:
    await reports(site, None, None)
    assert await gauges(site.http) == {}
