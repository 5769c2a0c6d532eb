"""Every query of the dashboard has an answer from a real stack, scraped by a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.process.network.ports import free_port
from tests.observability.prometheus_server import SHIPPED, prometheus
from tests.redis_servers import Standalone
from tests.stack import Stack, behind_gateway

pytestmark = pytest.mark.slow

DASHBOARD = json.loads((SHIPPED / "grafana/dashboards/outrider.json").read_text())
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}: {target['legendFormat']}")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]
VARIABLES = DASHBOARD["templating"]["list"]
PROMPTS = ("x = [1, 2, 3]\n" * 4, "def read(path):\n    ", "import os\nimport sys\n")


@contextmanager
def observed_stack(directory: Path) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Run a verifier, two drafters, a Redis and a gateway.

    Yields the gateway's URL, and the metrics ports, keyed by job.
    """
    verifier_port, *drafter_ports = (free_port() for _ in range(3))
    secret = directory / "secret"
    secret.write_text("s" * 32)
    server = Standalone(directory / "redis")
    stack = Stack("--metrics-port", str(verifier_port))
    pool = (*server.flags(), "--pool-secret-file", str(secret))
    stack.add_drafter("ngram-1", "ngram", "--metrics-port", str(drafter_ports[0]), *pool)
    stack.add_drafter("model-1", "model", "--metrics-port", str(drafter_ports[1]))
    try:
        with behind_gateway(stack) as gateway:
            ports = {"gateway": [gateway.port], "verifier": [verifier_port]}
            yield gateway.url, {**ports, "drafter": drafter_ports}
    finally:
        server.close()


async def traffic(url: str) -> None:
    """Send requests of every kind that a panel counts.

    The requests are completions and a chat, two requests that are refused, and a stream whose
    client leaves.
    """
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for family in ("ngram", "model", ""):
            speculation = {"drafter_family": family}
            common = {"max_tokens": 40, "temperature": 0, "speculation": speculation}
            bodies: list[dict[str, Any]] = [common | {"prompt": prompt} for prompt in PROMPTS]
            await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        chat = {"messages": [{"role": "user", "content": "Say x."}], "max_completion_tokens": 16}
        await client.post("/v1/chat/completions", json=chat)
        negative = {"prompt": "x", "max_tokens": -1}
        assert (await client.post("/v1/completions", json=negative)).status_code == 400
        unknown = {"prompt": "x", "speculation": {"drafter_id": "nobody"}}
        assert (await client.post("/v1/completions", json=unknown)).is_client_error
        long = {"prompt": "x", "max_tokens": 900, "stream": True}
        async with client.stream("POST", "/v1/completions", json=long) as response:
            await anext(response.aiter_bytes())


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a Prometheus that scraped a stack before, during and after its traffic."""
    directory = tmp_path_factory.mktemp("observability")
    with (
        observed_stack(directory) as (gateway, targets),
        prometheus(directory, targets) as url,
    ):
        asyncio.run(all_scraped(url, sum(map(len, targets.values()))))
        for _ in range(2):
            asyncio.run(traffic(gateway))
            time.sleep(1.5)
        yield url


async def all_scraped(url: str, count: int) -> None:
    """Wait until Prometheus has scraped `count` processes.

    Prometheus then sees all later counts as growth.
    """
    async with httpx.AsyncClient(timeout=60) as client:
        deadline = time.monotonic() + 60
        while True:
            try:
                answer = await client.get(f"{url}/api/v1/query", params={"query": "up == 1"})
                # Prometheus answers 503 while it starts.
                up = answer.raise_for_status().json()["data"]["result"]
            except httpx.HTTPError:
                up = []
            if len(up) == count:
                return
            assert time.monotonic() < deadline, up
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("expression", QUERIES)
def test_every_query_of_the_dashboard_returns_a_number(url: str, expression: str) -> None:
    query = expression.replace("$__rate_interval", "1m")
    for variable in VARIABLES:
        query = query.replace(f"${variable['name']}", variable["allValue"])
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", answer
    values = [float(series["value"][1]) for series in answer["data"]["result"]]
    assert values, "no series"
    assert not all(math.isnan(value) for value in values), "nothing but NaN"


def test_every_metric_in_a_query_is_exposed_and_every_panel_has_a_query(
    url: str,
) -> None:
    exposed = set(httpx.get(f"{url}/api/v1/label/__name__/values").json()["data"])
    named = {
        name
        for query in QUERIES
        for name in re.findall(r"(?:outrider:|gen_ai_)\w+", str(query.values[0]))
    }
    assert {name for name in named if name.startswith("outrider:") or "_seconds" in name} <= exposed
    assert all(panel.get("targets") for panel in DASHBOARD["panels"] if panel["type"] != "row")


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable["name"])
def test_every_variable_of_the_dashboard_has_a_value_and_a_query(url: str, variable: Any) -> None:
    query = variable["query"]["query"]
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
    assert found is not None
    answer = httpx.get(f"{url}/api/v1/label/{found[2]}/values", params={"match[]": found[1]})
    assert answer.json()["data"]
    assert any(f'=~"${variable["name"]}"' in str(query.values[0]) for query in QUERIES)


def test_the_rules_are_evaluated_without_an_error(url: str) -> None:
    groups = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 20
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
