"""The tokens that end a text are read from a model's untrusted files."""

import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from outrider.errors import OutriderError, Reason
from outrider.tokenizer import end_token_ids


def ids_of(folder: Path, **files: object) -> tuple[int, ...]:
    """Return the ids for a folder with these files, whose names are given without `.json`."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return end_token_ids(str(folder), 100)


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [7, 0]}, (7, 0)),
        ({"eos_token_id": 0, "text_config": {"eos_token_id": 7}}, (0,)),
        ({"text_config": {"eos_token_id": 7}}, (7,)),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 0}}, (0,)),
        ({"eos_token_id": None, "text_config": None}, ()),
        ({"eos_token_id": [], "text_config": {"eos_token_id": 7}}, ()),
        ({"eos_token_id": -1, "text_config": {"eos_token_id": 7}}, ()),
        ({"eos_token_id": [-1, 7]}, (7,)),
        ({}, ()),
    ],
)
def test_the_ids_of_the_text_config_stand_in_where_the_config_has_none(
    tmp_path: Path, config: object, ids: tuple[int, ...]
) -> None:
    assert ids_of(tmp_path, config=config) == ids


def test_the_ids_of_the_generation_config_come_first_if_it_has_any(tmp_path: Path) -> None:
    config = {"eos_token_id": 7}
    assert ids_of(tmp_path, config=config, generation_config={"eos_token_id": 0}) == (0,)
    assert ids_of(tmp_path, config=config, generation_config={"eos_token_id": None}) == (7,)
    assert ids_of(tmp_path, config=config, generation_config={}) == (7,)


@pytest.mark.parametrize(
    "config",
    [
        [7],
        "7",
        {"eos_token_id": "7"},
        {"eos_token_id": True},
        {"eos_token_id": 7.5},
        {"eos_token_id": {"7": 7}},
        {"eos_token_id": [7, None]},
        {"eos_token_id": [[7]]},
        {"text_config": [7]},
        {"text_config": "eos_token_id"},
        {"text_config": {"eos_token_id": "7"}},
    ],
)
def test_what_is_no_id_is_refused(tmp_path: Path, config: object) -> None:
    with pytest.raises(OutriderError, match=r"config\.json.* must be ") as error:
        ids_of(tmp_path, config=config)
    assert error.value.reason is Reason.INVALID_VALUE


@pytest.mark.parametrize(
    "text", [b"{", b"\xff", b"[" * 200_000, b'{"eos_token_id": ' + b"9" * 5_000 + b"}"]
)
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(OutriderError, match=r"config\.json must be JSON") as error:
        end_token_ids(str(tmp_path), 100)
    assert error.value.reason is Reason.INVALID_VALUE


def test_an_id_beyond_the_vocabulary_is_left_out(tmp_path: Path) -> None:
    assert ids_of(tmp_path, config={"eos_token_id": [7, 100, 10**13]}) == (7,)


@pytest.mark.parametrize("token", ["</s>", {"content": "</s>", "lstrip": False}])
@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map"])
def test_the_tokenizers_end_counts_where_the_configurations_state_none(
    name: str, token: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "</s>": 3}, "a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = {"config": {"model_type": "llama"}, name: {"eos_token": token}}
    with caplog.at_level(logging.INFO):
        assert ids_of(tmp_path, **files) == (3,)
        assert ids_of(tmp_path, config={"eos_token_id": [1, 0]}) == (1, 0)
    assert f"the ids 3 end a text, by its {name}.json's eos_token '</s>'" in caplog.text
    assert "the ids 1, 0 end a text, by its config.json" in caplog.text


def test_a_model_without_any_end_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert ids_of(tmp_path, config={}, tokenizer_config={"eos_token": None}) == ()
    assert "no token ends a text, by its files, which state none" in caplog.text
