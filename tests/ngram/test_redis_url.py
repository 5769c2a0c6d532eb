"""URLs of Redis: each form, and errors that name the setting but never the password."""

from pathlib import Path
from typing import Any

import pytest

from outrider.errors import OutriderError
from outrider.process.redis.server import RedisServer
from tests.redis_servers import Certificates


@pytest.mark.parametrize(
    ("url", "is_cluster", "expected"),
    [
        ("redis://host", False, ((("host", 6379),), 0)),
        ("redis://host:7000/3", False, ((("host", 7000),), 3)),
        ("rediss://[::1]:7000/", False, ((("::1", 7000),), 0)),
        ("redis://a", True, ((("a", 6379),), 0)),
        ("rediss://u:p@a:1/0,rediss://u:p@b:2/0", True, ((("a", 1), ("b", 2)), 0)),
    ],
)
def test_every_form_of_url_is_parsed(url: str, is_cluster: bool, expected: tuple[Any, ...]) -> None:
    server = RedisServer.parse(url, is_cluster=is_cluster)
    assert (server.addresses, server.database) == expected
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
    urls = "redis://user@a,redis://user@b"
    server = RedisServer.parse(urls, path, is_cluster=True)
    provider = server.options["credential_provider"]
    path.write_text("changed")
    assert provider.get_credentials() == ("user", "changed")
    assert "credential_provider" not in RedisServer.parse("redis://host").options


@pytest.mark.parametrize(
    ("url", "is_cluster", "message"),
    [
        ("", False, "must be a URL such as redis://USER@HOST"),
        ("redis+sentinel://host/name", False, "must be a URL such as"),
        ("unix:///run/redis.sock", False, "must be a URL such as"),
        ("redis://host:port", False, "must be a URL such as"),
        ("redis://host:70000", False, "must be a URL such as"),
        ("redis://u:hunter2@host/name", False, "must be a URL such as"),
        ("redis://u:hunter2@a,,redis://u:hunter2@b", True, "must be a URL such as"),
        ("redis://a,redis://b", False, "takes one URL, unless redis-cluster is given too"),
        ("redis://u:hunter2@a,redis://b", True, "the same user, password and options"),
        ("redis://a,rediss://b", True, "the same user, password and options"),
        ("redis://a/1", True, "takes no database"),
        ("redis://u:hunter2@host?ssl_certfile=x", False, "does not take 'ssl_certfile'"),
        ("rediss://host?socket_timeout=1", False, "does not take 'socket_timeout'"),
        ("redis://host?port=x", False, "does not take 'port'"),
        ("redis://host?connection_class=x", False, "does not take 'connection_class'"),
        ("rediss://u@host?password=hunter2", False, "does not take 'password'"),
        ("redis://host?socket_timeout=x", False, "must be a URL such as"),
    ],
)
def test_a_bad_url_is_refused_without_being_repeated(
    url: str, is_cluster: bool, message: str
) -> None:
    with pytest.raises(OutriderError) as caught:
        RedisServer.parse(url, is_cluster=is_cluster)
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
