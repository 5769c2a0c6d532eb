"""Real redis servers: one for each test that asks, and one of every topology for tests that hold in all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import Certificates, Cluster, Deployment, Sentinels, Standalone

_KINDS = {"redis": Standalone, "redis+sentinel": Sentinels, "redis+cluster": Cluster}


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Standalone]:
    server = Standalone(tmp_path)
    yield server
    server.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


_DEPLOYMENTS = [
    f"{scheme}{kind}" for kind in ("", "+sentinel", "+cluster") for scheme in ("redis", "rediss")
]
_QUICK = ("redis", "rediss+cluster")


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=[] if name in _QUICK else pytest.mark.slow)
        for name in _DEPLOYMENTS
    ],
)
def _deployment(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    certificates: Certificates,
) -> Iterator[Deployment]:
    scheme: str = request.param
    made = _KINDS[scheme.replace("rediss", "redis")](
        tmp_path_factory.mktemp("redis"), certificates if scheme.startswith("rediss") else None
    )
    yield made
    made.close()


@pytest.fixture
def deployment(_deployment: Deployment) -> Deployment:
    """Of every topology, without and with TLS, and empty. Not to be killed, since tests share it."""
    _deployment.each("FLUSHALL")
    return _deployment
