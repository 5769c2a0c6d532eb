"""Fixtures: a Redis server for one test, and one shared deployment of each topology."""

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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster for one test, which may stop its nodes."""
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


_QUICK = ("redis", "rediss+cluster")
_SLOW = ("rediss+sentinel",)


@pytest.fixture(
    scope="session",
    params=[*_QUICK, *[pytest.param(name, marks=pytest.mark.slow) for name in _SLOW]],
)
def _deployment(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    certificates: Certificates,
) -> Iterator[Deployment]:
    scheme: str = request.param
    tls = certificates if scheme.startswith("rediss") else None
    made = _KINDS[scheme.replace("rediss", "redis")](tmp_path_factory.mktemp("redis"), tls)
    yield made
    made.close()


@pytest.fixture
def deployment(_deployment: Deployment) -> Deployment:
    """An empty deployment of each topology, some with TLS. Tests share it: keep it up."""
    _deployment.each("FLUSHALL")
    return _deployment
