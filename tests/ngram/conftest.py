"""Fixtures: a Redis server for one test, and a shared server and cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_servers import Certificates, Cluster, Deployment, Standalone

# In the quick suite, only test_redis_topologies.py has a cluster.
SLOW = pytest.mark.slow


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Standalone]:
    server = Standalone(tmp_path)
    yield server
    server.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Yield a cluster for one test, which may stop its nodes."""
    made = Cluster(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session", params=[Standalone, pytest.param(Cluster, marks=SLOW)])
def _deployment(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    certificates: Certificates,
) -> Iterator[Deployment]:
    kind: type[Standalone | Cluster] = request.param
    tls = certificates if kind is Cluster else None
    made = kind(tmp_path_factory.mktemp("redis"), tls)
    yield made
    made.close()


@pytest.fixture
def deployment(_deployment: Deployment) -> Deployment:
    """Return an empty server or, in slow tests, an empty cluster with TLS.

    Tests share it, so no test may stop it.
    """
    _deployment.each("FLUSHALL")
    return _deployment
