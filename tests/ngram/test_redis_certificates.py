"""A Redis that asks for certificates: drafters show one, and say why a certificate is refused."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafter_svc.config import EraseSettings, RedisSettings, settings_schema
from outrider.process.redis.server import RedisServer
from outrider.process.security.tls import Tls
from tests.ngram.pools import found, pool, written
from tests.redis_servers import Certificates, Standalone
from tests.waiting import until


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """Yield a Redis whose clients must show a certificate of its authority."""
    certificates = Certificates(tmp_path_factory.mktemp("certificates"), clients=True)
    server = Standalone(tmp_path_factory.mktemp("redis"), certificates)
    yield server
    server.close()


def certificates_of(server: Standalone) -> Certificates:
    assert server.tls is not None
    return server.tls


def reached_with(server: Standalone, tls: Tls | None) -> RedisServer:
    return RedisServer.parse(server.url, server.password_file, tls)


STRANGERS = {
    "none": "tls-cert, tls-key and tls-ca are not given|certificate required",
    "expired": "drafter.pem has expired",
    "foreign": "no authority in .*ca.pem has signed the certificate .*drafter.pem",
    "server": "the peer's certificate is refused: self-signed certificate in certificate chain",
}


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_the_warning_names_why_a_certificate_is_refused(
    mutual: Standalone, stranger: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = certificates_of(mutual)
    server = reached_with(mutual, certificates.issue("drafter"))
    if stranger == "none":
        server = reached_with(mutual, None)
    elif stranger == "expired":
        certificates.issue("drafter", hours=-1)
    elif stranger == "foreign":
        certificates.issue("drafter", foreign=True)
    else:
        server.options["ssl_ca_certs"] = str(Certificates(tmp_path).ca)
    caplog.set_level(logging.WARNING, "drafter_svc.pools.redis")
    async with pool(server) as made:
        assert await found(made, [[1]]) == [[]]
        await until(lambda: made.counters.failed > 0)
    assert re.search(STRANGERS[stranger], caplog.text)


async def test_a_renewed_certificate_is_used_without_a_restart(mutual: Standalone) -> None:
    certificates = certificates_of(mutual)
    async with pool(reached_with(mutual, certificates.issue("drafter"))) as made:
        await written(made, ([5], [6]))
    async with pool(reached_with(mutual, certificates.issue("drafter", hours=-1))) as made:
        assert await found(made, [[5]]) == [[]]
        await until(lambda: made.counters.failed > 0)
        certificates.issue("drafter")
        async with asyncio.timeout(10):
            # A lookup has 5 ms, and the first lookups may begin before there is a connection.
            while await found(made, [[5]]) != [[6]]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("process", ["drafter", "erase"])
def test_the_certificate_of_the_process_is_used_unless_the_url_names_another(
    mutual: Standalone, process: str
) -> None:
    tls = certificates_of(mutual).issue("drafter")
    files = {"tls_cert": tls.cert, "tls_key": tls.key, "tls_ca": tls.ca}

    def options(url: str) -> dict[str, object]:
        given = {"redis": url, **files}
        settings: RedisSettings = EraseSettings.model_validate(given)
        if process == "drafter":
            loaded = settings_schema("ngram").model_validate({"family": "ngram", **given})
            assert isinstance(loaded, RedisSettings)
            settings = loaded
        server = settings.redis_server()
        assert server is not None
        return server.options

    own = options("rediss://host")
    assert (own["ssl_certfile"], own["ssl_ca_certs"]) == (str(tls.cert), str(tls.ca))
    assert options("rediss://host?ssl_certfile=/x&ssl_keyfile=/y")["ssl_certfile"] == "/x"
    assert "ssl_certfile" not in options("redis://host")
