"""A pipe, a device or a huge file in place of a file stops no process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from drafter_svc.pools.keys import read_secret
from gateway.access.key_file import read_keys
from outrider.errors import OutriderError
from outrider.heads.convert import run as convert
from outrider.heads.reading import read
from outrider.lm.checkpoint import read_checkpoint
from outrider.process import files
from outrider.process.redis.server import RedisServer
from outrider.process.security.tls import expires_at
from outrider.process.settings.config import load
from outrider.tokenizer import end_token_ids, load_tokenizer
from outrider_cli.serve_settings import ServeSettings
from tests.shared.grammar_texts import TARGET

# If a read waited for a writer, it would wait for ever.
pytestmark = pytest.mark.timeout(60)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(files.MOST_BYTES + 1)


ODD = (make_pipe, make_device, make_large)
READERS: list[Callable[[Path], object]] = [
    lambda path: read_keys(path),
    lambda path: read_secret(path),
    lambda path: expires_at(path),
    lambda path: RedisServer.parse("redis://me@h", path),
    lambda path: RedisServer.parse(f"rediss://me@h?ssl_ca_certs={path}"),
    lambda path: load(ServeSettings, {"target": "x", "config": path}),
]


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("reader", READERS, ids=range(len(READERS)))
def test_an_odd_file_of_a_setting_is_refused_by_name(
    reader: Callable[[Path], object], make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "odd"
    make(path)
    with pytest.raises((OutriderError, ValueError), match="odd"):
        reader(path)


MODEL_READERS: list[Callable[[str], object]] = [
    load_tokenizer,
    lambda model: end_token_ids(model, 4096),
    lambda model: read_checkpoint(model, "float32", trust_remote_code=False),
    lambda model: read(model, None),
    lambda model: convert(Path(model), Path(model) / "out"),
]


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("reader", MODEL_READERS, ids=range(len(MODEL_READERS)))
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_an_odd_file_of_a_model_or_a_head_is_refused_by_name(
    reader: Callable[[str], object], make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(TARGET, model, symlinks=True)
    (model / name).unlink(missing_ok=True)
    make(model / name)
    with pytest.raises(OutriderError, match=name):
        reader(str(model))


def test_ordinary_files_and_links_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    assert files.read_file(tmp_path / "link") == b"text"
    assert files.read_file(Path("/proc/self/status"))
    with pytest.raises(OSError, match="more than 3 bytes"):
        files.read_file(tmp_path / "file", 3)
    with pytest.raises(IsADirectoryError):
        files.read_file(tmp_path)
    (tmp_path / "dangling").symlink_to("nothing")
    files.check_folder(tmp_path)
