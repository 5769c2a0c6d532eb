"""Our forwards give the scores of independent code, which `golden/make.py` recorded."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from outrider.heads.kinds.dynamic_tree import WIDTH
from outrider.heads.loading import load
from outrider.heads.model import Extension, HeadModel, HeadProposal, TargetWeights
from outrider.heads.reading import read, with_reading
from outrider.protocol.token_tree import MAX_TREE_TOKENS
from tests.heads.head_files import Target
from tests.heads.head_scores import scores_of

FOLDER = Path(__file__).parent / "golden"
HIDDEN, VOCAB, LAYERS = 16, 40, 6
STATES = (1, 3, 5)
CASES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))


TARGET = Target(
    hidden_size=HIDDEN, num_hidden_layers=LAYERS, vocab_size=VOCAB, max_position_embeddings=128
)


class Golden:
    """One recorded case, and the head made of it."""

    def __init__(self, name: str, folder: Path) -> None:
        with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            (folder / "config.json").write_text(file.metadata()["config"])
        head = {key[5:]: value for key, value in tensors.items() if key.startswith("head/")}
        save_file(head, folder / "model.safetensors")
        self.folder = folder
        # SpecForge and vLLM interpret these files differently; vLLM's interpretation is number 1.
        self.reading = 2 if name in ("eagle3-1-specforge", "eagle3-no-norm-specforge") else 1
        self.tokens = tensors["tokens"].tolist()
        self.features = tensors["features"]
        self.scores = tensors["scores"]
        self.confidences = tensors.get("confidences")
        self.beams = tensors.get("beams")
        self.beam_scores = tensors.get("beam_scores")
        self.lengths = tensors["lengths"].tolist()
        nothing = torch.zeros(VOCAB, HIDDEN)
        self.weights = TargetWeights(
            tensors.get("embeddings", nothing), tensors.get("lm_head", nothing)
        )

    def model(self, **settings: Any) -> HeadModel:
        head = read(self.folder, TARGET, STATES if self.reading > 1 else None)
        head = with_reading(head, self.reading)
        return load(head, self.weights, page_count=16, page_size=4, **settings)

    def scores_of(self, model: HeadModel) -> tuple[torch.Tensor, HeadProposal]:
        """Return the model's scores after the recorded lengths, for tokens in its vocabulary."""
        steps = self.scores.shape[1]
        spread, proposal = scores_of(model, self.tokens, self.features, self.lengths, steps)
        if model.target_ids is not None:
            assert spread.isinf().sum(-1).unique().tolist() == [VOCAB - len(model.target_ids)]
            spread = spread[..., model.target_ids]
        return spread, proposal


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_independent_code(name: str, tmp_path: Path) -> None:
    golden = Golden(name, tmp_path)
    with torch.inference_mode():
        scores, proposal = golden.scores_of(golden.model())
    torch.testing.assert_close(scores, golden.scores, atol=1e-4, rtol=0)
    # If all scores of a head were equal, the comparison would show nothing.
    assert scores.std() > 0.3
    if golden.confidences is not None:
        torch.testing.assert_close(proposal.confidences, golden.confidences, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["redrafter", "redrafter-sum"])
def test_a_tree_holds_the_beam_of_apples_search(name: str, tmp_path: Path) -> None:
    """A tree has the chain, and beside the chain as many paths as the beam has in all."""
    golden = Golden(name, tmp_path)
    assert golden.beams is not None
    assert golden.beam_scores is not None
    number, width, steps = golden.beams.shape
    assert width == WIDTH - 1
    model = golden.model()
    sequences = [model.open(golden.tokens[:n]) for n in golden.lengths]
    model.extend([Extension(s, [], golden.features[: len(s.tokens) - 1], 0) for s in sequences])
    found = model.propose(sequences, steps, WIDTH)
    for i in range(number):
        shares = shares_of_paths(found, i)
        for beam, score in zip(golden.beams[i], golden.beam_scores[i], strict=True):
            assert math.log(shares[tuple(beam.tolist())]) == pytest.approx(float(score), abs=1e-4)


def test_a_draft_with_too_many_levels_for_a_tree_is_a_chain(tmp_path: Path) -> None:
    golden = Golden("redrafter", tmp_path)
    model = golden.model()
    sequences = [model.open(golden.tokens[: golden.lengths[0]])]
    model.extend([Extension(s, [], golden.features[: len(s.tokens) - 1], 0) for s in sequences])
    levels = MAX_TREE_TOKENS // WIDTH + 1
    assert any(model.propose(sequences, levels, WIDTH).deeper or [])
    assert not any(model.propose(sequences, levels + 1, WIDTH).deeper or [])


def shares_of_paths(found: HeadProposal, i: int) -> dict[tuple[int, ...], float]:
    """Return the product of the shares along each path of sequence i's tree."""
    chain, product, ahead = found.tokens[i].tolist(), 1.0, [1.0]
    paths: dict[tuple[int, ...], float] = {}
    for at, (best, shares) in enumerate(zip(found.best[i], found.shares[i], strict=True)):
        for token, share in zip(best.tolist(), shares.tolist(), strict=True):
            paths[*chain[:at], token] = product * share
        product *= float(shares[0])
        ahead.append(product)
    for branch in found.deeper[i]:
        paths[*chain[: branch.at], *branch.run] = ahead[branch.at] * math.prod(branch.shares)
    return paths


def test_every_kind_has_a_recorded_case() -> None:
    kinds = set()
    for name in CASES:
        with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
            config = json.loads(file.metadata()["config"])
        kinds.add(config.get("speculators_model_type") or name.partition("-")[0])
    assert kinds == {"eagle3", "peagle", "dflash", "dspark", "mtp", "eagle", "medusa", "redrafter"}
