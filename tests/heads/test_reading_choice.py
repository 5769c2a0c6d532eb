"""The interpretation of a head's file is chosen by how often the head's guesses are right."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.errors import OutriderError
from outrider.heads.loading import load
from outrider.heads.model import Extension, HeadModel, TargetWeights
from outrider.heads.reading import read, with_reading
from outrider.heads.reading_choice import choose_reading
from outrider.heads.spec import Head, HeadSpec
from tests.heads import head_files
from tests.heads.head_files import TARGET, VOCAB, write
from tests.heads.head_scores import scores_of

LENGTH = 80


class Texts:
    """A head whose file has two interpretations of its layers, and a target's states of a text."""

    def __init__(self, head: Head) -> None:
        torch.manual_seed(3)
        self.head = head
        self.weights = TargetWeights(torch.randn(VOCAB, 16), torch.randn(VOCAB, 16))
        self.text = torch.randint(VOCAB, (LENGTH,)).tolist()
        self.states = {i: torch.randn(LENGTH, 16) for i in range(11)}

    def model(self) -> HeadModel:
        return load(self.head, self.weights, page_count=20)

    def own_answers(self, spec: HeadSpec) -> list[int]:
        """Return a text for which the head, read by `spec`, has two right guesses in each draft.

        There is a draft for every second token. So the text has the next draft's first guess where
        a draft has its third guess.
        """
        model = load(replace(self.head, spec=spec), self.weights, page_count=400)
        features = torch.cat([self.states[i] for i in spec.aux_layers], dim=-1)
        answers = [0] * (LENGTH + 3)
        for length in range(3, LENGTH - 2, 2):
            scores, _ = scores_of(model, self.text, features, [length], 3)
            for step, guess in enumerate(scores[0].argmax(-1).tolist()):
                answers[length - 1 + step] = guess
        return answers

    def answers(self, aux_layers: tuple[int, ...]) -> list[int]:
        """Return target tokens for which a head that reads `aux_layers` is always right."""
        model = self.model()
        features = torch.cat([self.states[i] for i in aux_layers], dim=-1)
        sequence, answers = model.open(self.text[:1]), [0]
        for length in range(2, LENGTH + 1):
            row = features[length - 2 : length - 1]
            news = Extension(sequence, self.text[length - 1 : length], row, length - 2)
            model.extend([news])
            answers += model.propose([sequence], 1).tokens[0].tolist()
        return answers


@pytest.fixture(params=["eagle3", "dspark"])
def texts(request: pytest.FixtureRequest, tmp_path: Path) -> Texts:
    files = {"eagle3": head_files.eagle3_modelopt, "dspark": head_files.dspark_deepspec}
    return Texts(read(write(tmp_path, files[request.param]()), TARGET))


@pytest.mark.parametrize("index", [0, 1])
def test_the_layers_with_the_most_right_guesses_are_chosen(texts: Texts, index: int) -> None:
    options = texts.head.spec.readings
    right = options[index]
    answers = texts.answers(right.aux_layers)
    choice = choose_reading(texts.model(), texts.text, texts.states, answers)
    assert (choice.spec, choice.clear) == (right, True)
    counts = [matches.first for matches in choice.matches]
    assert counts[index] == choice.tried == 39
    assert counts[1 - index] < 20


def test_a_choice_that_is_not_clear_keeps_the_files_and_warns(
    texts: Texts, caplog: pytest.LogCaptureFixture
) -> None:
    answers = torch.randint(VOCAB, (LENGTH,)).tolist()
    with caplog.at_level(logging.INFO):
        choice = choose_reading(texts.model(), texts.text, texts.states, answers)
    assert (choice.spec.aux_layers, choice.clear) == (texts.head.spec.aux_layers, False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "--head-reading" in caplog.text


def test_layers_that_the_user_set_are_not_questioned(tmp_path: Path) -> None:
    texts = Texts(read(write(tmp_path, head_files.eagle3_modelopt()), TARGET, (1, 2, 3)))
    wrong = [0] * LENGTH
    choice = choose_reading(texts.model(), texts.text, texts.states, wrong)
    assert (choice.spec.aux_layers, choice.clear) == ((1, 2, 3), True)
    assert [matches.spec.aux_layers for matches in choice.matches] == [(1, 2, 3)]


def eagle31_by_specforge() -> head_files.Files:
    """Return EAGLE-3.1 as SpecForge writes it: trained on recycled states without the last norm."""
    config, tensors = head_files.eagle3_specforge()
    assert config["norm_output"] is True
    norms = {f"fc_norm.{i}.weight": torch.rand(16) + 0.5 for i in range(3)}
    # This norm changes a recycled state.
    return config | {"fc_norm": True}, tensors | norms | {"norm.weight": torch.randn(16)}


def without_norm_by_specforge() -> head_files.Files:
    config, tensors = head_files.eagle3_specforge()
    return config | {"norm_output": False}, tensors | {"norm.weight": torch.randn(16)}


def with_partial_rotary() -> head_files.Files:
    config, tensors = head_files.eagle3_speculators()
    rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    config["transformer_layer_config"] = head_files.TOP_LEVEL | {"rope_parameters": rope}
    return config, tensors


DOUBTS: dict[str, Callable[[], head_files.Files]] = {
    "the state that is recycled": eagle31_by_specforge,
    "the norm before lm_head": without_norm_by_specforge,
    "the channels that are rotated": with_partial_rotary,
}


@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("doubt", DOUBTS)
def test_what_a_key_means_is_told_by_the_guesses(doubt: str, form: int, tmp_path: Path) -> None:
    head = read(write(tmp_path, DOUBTS[doubt]()), TARGET, (2, 5, 7))
    forms = head.spec.readings
    assert len(forms) == 2
    texts = Texts(head)
    answers = texts.own_answers(forms[form])
    model = texts.model()
    choice = choose_reading(model, texts.text, texts.states, answers)
    assert (choice.spec, choice.clear) == (forms[form], True)
    assert model.spec == head.spec
    assert model.pool.used_count == 0
    assert len(set(choice.shown)) == 2


def test_a_reading_can_be_chosen_by_its_number(tmp_path: Path) -> None:
    head = read(write(tmp_path, eagle31_by_specforge()), TARGET)
    kinds = [(spec.aux_layers, spec.recycle_normed) for spec in head.spec.readings]
    assert kinds == [(ids, norm) for norm in (True, False) for ids in ((2, 5, 7), (1, 4, 6))]
    for number, kind in enumerate(kinds, 1):
        spec = with_reading(head, number).spec
        assert (spec.aux_layers, spec.recycle_normed) == kind
        assert spec.readings == [spec]
    with pytest.raises(OutriderError, match="head_reading is 5, but the head's file may mean 4"):
        with_reading(head, 5)
