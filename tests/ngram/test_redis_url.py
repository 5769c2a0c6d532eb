"""URLs of Redis: each form, and errors that name the setting but never the password."""

from pathlib import Path
from typing import Any

import pytest
from redis_servers import Certificates

from outrider.errors import OutriderError
from outrider.process.redis.server import RedisServer


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", ("standalone", (("host", 6379),), 0, "")),
        ("redis://host:7000/3", ("standalone", (("host", 7000),), 3, "")),
        ("rediss://[::1]:7000", ("standalone", (("::1", 7000),), 0, "")),
        ("redis+sentinel://a,b:7000/pool", ("sentinel", (("a", 26379), ("b", 7000)), 0, "pool")),
        ("rediss+sentinel://u@a/my%20pool/2", ("sentinel", (("a", 26379),), 2, "my pool")),
        ("redis+cluster://a,b:7000", ("cluster", (("a", 6379), ("b", 7000)), 0, "")),
        ("rediss+cluster://u:p@a:1,b:2/0", ("cluster", (("a", 1), ("b", 2)), 0, "")),
    ],
)
def test_every_form_of_url_is_parsed(url: str, expected: tuple[Any, ...]) -> None:
    server = RedisServer.parse(url)
    assert (server.topology, server.addresses, server.database, server.service) == expected
    assert server.options.get("ssl", False) == url.startswith("rediss")


def test_the_password_comes_from_the_url_or_its_file_each_time(
    tmp_path: Path,
) -> None:
    def credentials(*arguments: Any) -> object:
        return RedisServer.parse(*arguments).options["credential_provider"].get_credentials()

    path = tmp_path / "password"
    path.write_text("from file\n")
    assert credentials("redis://us%40er:pass%2Fword@host") == ("us@er", "pass/word")
    assert credentials("redis://:word@host") == ("word",)
    assert credentials("redis://user@host", path) == ("user", "from file")
    assert credentials("redis://host", path) == ("from file",)
    provider = RedisServer.parse("redis+cluster://user@a,b", path).options["credential_provider"]
    path.write_text("changed")
    assert provider.get_credentials() == ("user", "changed")
    assert "credential_provider" not in RedisServer.parse("redis://host").options


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "must look like redis://HOST"),
        ("redis+ring://host", "must look like"),
        ("redis://host:port", "must look like"),
        ("redis://host:70000", "must look like"),
        ("redis+cluster://u:hunter2@a,,b", "must look like"),
        ("redis://a,b", "takes one address"),
        ("redis://host/name", "number after the last slash"),
        ("redis+sentinel://a:1,b:2", "Sentinel's name of the service"),
        ("redis+cluster://a/1", "takes no database"),
        ("redis://u:hunter2@host?ssl_certfile=x", "does not take 'ssl_certfile'"),
        ("rediss://host?socket_timeout=1", "does not take 'socket_timeout'"),
        ("redis+sentinel://a/pool?sentinel_auth=perhaps", "sentinel_auth as true or false"),
    ],
)
def test_a_bad_url_is_refused_without_being_repeated(url: str, message: str) -> None:
    with pytest.raises(OutriderError) as caught:
        RedisServer.parse(url)
    assert str(caught.value).startswith("redis ")
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_bad_file_is_refused_and_the_setting_named(
    tmp_path: Path, certificates: Certificates
) -> None:
    missing, empty, rubbish = (tmp_path / name for name in ("missing", "empty", "rubbish"))
    empty.write_text("\n")
    rubbish.write_text("not a certificate")
    for url, password, message in (
        (
            "redis://u@host",
            missing,
            "redis-password-file .*missing cannot be read: No such file",
        ),
        ("redis://u@host", tmp_path, "redis-password-file .* cannot be read: Is a directory"),
        ("redis://u@host", empty, "redis-password-file .*empty is empty"),
        ("redis://u:p@host", rubbish, "redis-password-file must not be given"),
        (f"rediss://host?ssl_ca_certs={missing}", None, "missing is no file of PEM certificates"),
        (f"rediss://host?ssl_ca_certs={rubbish}", None, "rubbish is no file of PEM certificates"),
        (f"redis://host?ssl_ca_certs={certificates.ca}", None, "does not take 'ssl_ca_certs'"),
    ):
        with pytest.raises(OutriderError, match=message):
            RedisServer.parse(url, password)
