"""`outrider keys` adds, lists and revokes keys; only the printed key is secret."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.access.key_file import KeyEntry, key_digest, read_keys
from outrider.process.settings.usage import invoke
from outrider_cli import keys as keys_command
from outrider_cli.main import app


def keys(*arguments: str) -> int:
    status = invoke(app, "outrider", ["keys", *arguments])
    return int(status or 0)


def test_add_prints_the_key_once_and_stores_its_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.yaml"
    limit = ("--concurrent-sequences", "4")
    assert keys("add", str(file), "--tenant", "alice", "--days", "30", *limit) == 0
    printed = capsys.readouterr()
    key = printed.out.strip()
    assert len(key) > 43
    assert key not in file.read_text() + printed.err
    [entry] = read_keys(file)
    assert entry.sha256 == key_digest(key)
    assert (entry.id, entry.tenant, entry.role) == ("alice-1", "alice", "tenant")
    assert entry.concurrent_sequences == 4
    assert entry.expires is not None


def test_keys_are_listed_without_hashes_and_revoked_by_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.yaml"
    for tenant in ("alice", "alice", "bob"):
        keys("add", str(file), "--tenant", tenant)
    capsys.readouterr()
    assert keys("list", str(file)) == 0
    listed = capsys.readouterr().out
    for name in ("alice-1", "alice-2", "bob-1"):
        assert name in listed
    assert not any(entry.sha256 in listed for entry in read_keys(file))
    assert keys("revoke", str(file), "alice-1") == 0
    assert [entry.id for entry in read_keys(file)] == ["alice-2", "bob-1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["revoke", "{file}", "none"], "none is not a key of"),
        (["add", "{file}", "--tenant", "bob", "--id", "alice-1"], "alice-1 is a key of"),
        (["add", "{file}", "--tenant", "a b"], "the key cannot be made: "),
        (["list", "{file}.none"], "cannot be read: No such file"),
        (["add", "/nowhere/keys.yaml", "--tenant", "a"], "No such file"),
    ],
)
def test_an_error_is_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.yaml"
    keys("add", str(file), "--tenant", "alice")
    before = file.read_text()
    capsys.readouterr()
    assert keys(*(argument.replace("{file}", str(file)) for argument in arguments)) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("outrider keys: ")
    assert says in printed.err
    assert (printed.err.count("\n"), printed.out) == (1, "")
    assert file.read_text() == before


def test_a_key_is_revoked_in_the_file_behind_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "data" / "keys.yaml", tmp_path / "keys.yaml"
    real.parent.mkdir()
    link.symlink_to("data/keys.yaml")
    for tenant in ("alice", "bob"):
        assert keys("add", str(link), "--tenant", tenant) == 0
    assert keys("revoke", str(link), "alice-1") == 0
    assert link.is_symlink()
    assert [entry.id for entry in read_keys(real)] == ["bob-1"]


def test_commands_at_the_same_time_lose_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.yaml"
    keys("add", str(file), "--tenant", "old")

    def slow(path: Path) -> tuple[KeyEntry, ...]:
        entries = read_keys(path)
        time.sleep(0.1)
        return entries

    monkeypatch.setattr(keys_command, "read_keys", slow)
    with ThreadPoolExecutor() as pool:
        done = [pool.submit(keys_command.revoke, file, "old-1")]
        done += [pool.submit(keys_command.add, file, {"tenant": t}, None) for t in ("a", "b", "c")]
    assert [each.result() for each in done] == [0] * 4
    assert sorted(entry.id for entry in read_keys(file)) == ["a-1", "b-1", "c-1"]
