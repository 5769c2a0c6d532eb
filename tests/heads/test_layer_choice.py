"""The layers that a head was trained on are found by how often its guesses are right."""

import logging
from pathlib import Path

import head_files
import pytest
import torch
from head_files import TARGET, VOCAB, write

from outrider.heads.layer_choice import candidates, choose_layers
from outrider.heads.loading import load
from outrider.heads.model import Extension, HeadModel, TargetWeights
from outrider.heads.reading import read
from outrider.heads.spec import Head

LENGTH = 80


class Texts:
    """A head whose file may mean two triples of layers, and a target's states of a text."""

    def __init__(self, head: Head) -> None:
        torch.manual_seed(3)
        self.head = head
        self.weights = TargetWeights(torch.randn(VOCAB, 16), torch.randn(VOCAB, 16))
        self.text = torch.randint(VOCAB, (LENGTH,)).tolist()
        self.states = {i: torch.randn(LENGTH, 16) for i in range(11)}

    def model(self) -> HeadModel:
        return load(self.head, self.weights, page_count=20)

    def answers(self, boundaries: tuple[int, ...]) -> list[int]:
        """What the target would say if the head, on these layers, were always right."""
        model = self.model()
        features = torch.cat([self.states[i] for i in boundaries], dim=-1)
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
    options = candidates(texts.head.spec)
    right = options[index]
    answers = texts.answers(right)
    choice = choose_layers(texts.model(), texts.text, texts.states, answers)
    assert (choice.boundaries, choice.clear) == (right, True)
    assert choice.matches[right] == choice.tried == 39
    assert choice.matches[options[1 - index]] < 20


def test_a_choice_that_is_not_clear_keeps_the_files_and_warns(
    texts: Texts, caplog: pytest.LogCaptureFixture
) -> None:
    answers = torch.randint(VOCAB, (LENGTH,)).tolist()
    with caplog.at_level(logging.INFO):
        choice = choose_layers(texts.model(), texts.text, texts.states, answers)
    assert (choice.boundaries, choice.clear) == (texts.head.spec.boundaries, False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "--head-states" in caplog.text


def test_layers_that_the_user_set_are_not_questioned(tmp_path: Path) -> None:
    texts = Texts(read(write(tmp_path, head_files.eagle3_modelopt()), TARGET, (1, 2, 3)))
    wrong = [0] * LENGTH
    choice = choose_layers(texts.model(), texts.text, texts.states, wrong)
    assert (choice.boundaries, choice.clear) == ((1, 2, 3), True)
    assert [*choice.matches] == [(1, 2, 3)]
