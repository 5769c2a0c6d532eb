"""Guesses depend only on text and features, not on batch, pages, chunks, rewinds or prefix hits.

The reference is a single sequence, read at once, in one page. `test_golden` compares such a
sequence's guesses with those of independent code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.heads.loading import load, target_weights
from outrider.heads.model import (
    Extension,
    HeadModel,
    HeadProposal,
    HeadSequence,
    NoPages,
    Place,
    TargetWeights,
)
from outrider.heads.reading import read
from outrider.heads.spec import Head
from tests.heads.head_files import DIALECTS, TARGET, VOCAB, Files, redrafter_adding_up, write

COUNT, WIDTH, PAGE = 4, 3, 4


def windowed() -> Files:
    config, tensors = DIALECTS["dflash"]["zlab"]()
    kinds = ["sliding_attention", "full_attention"]
    return config | {"sliding_window": 6, "layer_types": kinds}, tensors


def sliding() -> Files:
    config, tensors = DIALECTS["eagle3"]["speculators"]()
    layer = config["transformer_layer_config"]
    window = {"sliding_window": 6, "layer_types": ["sliding_attention"]}
    return config | {"transformer_layer_config": layer | window}, tensors


FILES: dict[str, Callable[[], Files]] = {
    **{kind: next(iter(dialects.values())) for kind, dialects in DIALECTS.items()},
    "eagle3, a window": sliding,
    "dflash, a window": windowed,
    "redrafter, adding up": redrafter_adding_up,
}
WITH_PAGES = [kind for kind in FILES if not kind.startswith(("medusa", "redrafter"))]


class Rig:
    """A head, and texts. A token's features are a function of the text up to the token."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.head: Head = read(write(folder, FILES[kind]()), TARGET)
        torch.manual_seed(9)
        matrices = torch.randn(VOCAB, 16), torch.randn(VOCAB, 16) / 4
        self.weights = TargetWeights(*matrices)
        self._by_token = torch.randn(VOCAB, self.head.spec.feature_width)
        self.random = random.Random(9)

    def model(self, page_size: int = PAGE, pages: int = 40, **settings: Any) -> HeadModel:
        return load(self.head, self.weights, page_count=pages, page_size=page_size, **settings)

    def text(self, length: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(length)]

    def features(self, text: list[int]) -> torch.Tensor:
        """Return features of all tokens but the last; each depends on the text up to its token."""
        rows = self._by_token[text[:-1]]
        return rows.cumsum(0) / torch.arange(1, len(text))[:, None].sqrt()

    def extension(self, sequence: HeadSequence, text: list[int]) -> Extension:
        """Return the extension that takes a sequence from its state to the committed text."""
        first = sequence.wanted
        added = text[len(sequence.tokens) :]
        return Extension(sequence, added, self.features(text)[first:], first)

    def read(self, model: HeadModel, text: list[int], tenant: str = "") -> HeadSequence:
        """Return a sequence for which the model has read the text and its features."""
        sequence = model.open(text, tenant)
        model.extend([self.extension(sequence, text)])
        return sequence

    def alone(self, text: list[int]) -> HeadProposal:
        model = self.model(page_size=128, pages=1)
        sequence = model.open(text[:1])
        model.extend([self.extension(sequence, text)])
        return model.propose([sequence], COUNT, WIDTH)


@pytest.fixture(params=FILES)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(request.param, tmp_path)


@pytest.fixture(params=WITH_PAGES)
def paged(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(request.param, tmp_path)


def assert_same(found: HeadProposal, row: int, expected: HeadProposal) -> None:
    assert found.tokens[row].tolist() == expected.tokens[0].tolist()
    assert found.best[row].tolist() == expected.best[0].tolist()
    for one, other in (
        (found.shares, expected.shares),
        (found.confidences, expected.confidences),
    ):
        torch.testing.assert_close(one[row], other[0], atol=1e-5, rtol=1e-4)


def test_a_batch_read_in_pieces_guesses_as_each_text_alone(rig: Rig) -> None:
    texts = [rig.text(length) for length in (2, 5, 17, 33)]
    model = rig.model(batch_rows=5)
    sequences = [model.open(text) for text in texts]
    while not all(sequence.ready for sequence in sequences):
        news = []
        for sequence, text in zip(sequences, texts, strict=True):
            full = rig.extension(sequence, text)
            rows = rig.random.randint(0, 9)
            news.append(Extension(sequence, [], full.features[:rows], full.first_position))
        model.extend(news)
    found = model.propose(sequences, COUNT, WIDTH)
    for row, text in enumerate(texts):
        assert_same(found, row, rig.alone(text))


def test_committed_tokens_overwrite_what_was_guessed(rig: Rig) -> None:
    text = rig.text(40)
    model = rig.model()
    sequence = model.open(text[:7])
    for length in (7, 8, 11, 12, 17, 30):
        model.extend([rig.extension(sequence, text[:length])])
        assert_same(model.propose([sequence], COUNT, WIDTH), 0, rig.alone(text[:length]))


def test_features_that_come_again_change_nothing(rig: Rig) -> None:
    text = rig.text(14)
    model = rig.model()
    sequence = rig.read(model, text)
    model.extend([Extension(sequence, [], torch.full_like(rig.features(text), torch.nan), 0)])
    assert_same(model.propose([sequence], COUNT, WIDTH), 0, rig.alone(text))


def test_a_cached_prefix_needs_no_features_and_changes_no_guess(paged: Rig) -> None:
    text = paged.text(31)
    model = paged.model()
    first = paged.read(model, text, "tenant")
    model.close(first)
    other = [*text[:21], *paged.text(5)]
    second = model.open(other, "tenant")
    assert second.wanted == 20
    model.extend([paged.extension(second, other)])
    assert_same(model.propose([second], COUNT, WIDTH), 0, paged.alone(other))
    same = model.open(text, "tenant")
    assert not same.ready
    assert same.wanted >= 28
    model.extend([paged.extension(same, text)])
    assert_same(model.propose([same], COUNT, WIDTH), 0, paged.alone(text))


def test_guesses_are_never_cached(paged: Rig) -> None:
    text = paged.text(30)
    model = paged.model()
    first = paged.read(model, text[:6], "tenant")
    guessed = [*text[:6], *model.propose([first], COUNT).tokens[0].tolist()]
    model.close(first)
    longer = [*guessed, *paged.text(9)]
    second = model.open(longer, "tenant")
    assert second.wanted <= 6
    model.extend([paged.extension(second, longer)])
    assert_same(model.propose([second], COUNT, WIDTH), 0, paged.alone(longer))


def test_prefixes_are_shared_only_with_the_same_tenant_and_first_token(paged: Rig) -> None:
    text = paged.text(20)
    model = paged.model()
    paged.read(model, text, "tenant")
    assert model.open(text, "other").wanted == 0
    assert model.open(text).wanted == 0
    assert model.open([(text[0] + 1) % VOCAB, *text[1:]], "tenant").wanted == 0
    assert model.open(text, "tenant").wanted > 0


def test_after_a_gap_the_head_goes_on_with_the_text_behind_it(rig: Rig) -> None:
    """The head then guesses as it would for a text that begins after the gap."""
    text = rig.text(30)
    features = rig.features(text)
    model = rig.model()
    sequence = model.open(text, "tenant")
    model.extend([Extension(sequence, [], features[:10], 0)])
    model.extend([Extension(sequence, [], features[13:], 13)])
    fresh = rig.model()
    tail = fresh.open(text[13:])
    fresh.extend([Extension(tail, [], features[13:], 0)])
    expected = fresh.propose([tail], COUNT, WIDTH)
    assert_same(model.propose([sequence], COUNT, WIDTH), 0, expected)
    if model.cache is not None:
        # After a gap no page of the sequence is shared, since its text began in the middle.
        assert model.open(text, "tenant").wanted <= 10


def test_without_free_pages_nothing_changes(paged: Rig) -> None:
    text = paged.text(30)
    model = paged.model(pages=5)
    sequence = paged.read(model, text[:9])
    with pytest.raises(NoPages):
        model.extend([paged.extension(sequence, text)])
    assert (len(sequence.tokens), sequence.wanted) == (9, 8)
    if paged.head.spec.block_size < 5:
        assert_same(model.propose([sequence], COUNT, WIDTH), 0, paged.alone(text[:9]))
    model.close(sequence)
    model.pool.check_integrity()
    assert model.pool.free_count == 5


def test_rows_that_cannot_be_are_refused(rig: Rig) -> None:
    model = rig.model()
    text = rig.text(6)
    sequence = model.open(text)
    with pytest.raises(ValueError, match="features have 5 numbers"):
        model.extend([Extension(sequence, [], torch.zeros(2, 5), 0)])
    too_many = torch.zeros(6, rig.head.spec.feature_width)
    with pytest.raises(ValueError, match="the last committed token"):
        model.extend([Extension(sequence, [], too_many, 0)])
    with pytest.raises(ValueError, match="is not ready"):
        model.propose([sequence], 1)


def test_the_best_tokens_come_first_and_a_chain_takes_them(rig: Rig) -> None:
    model = rig.model()
    text = rig.text(12)
    sequence = rig.read(model, text)
    found = model.propose([sequence], COUNT, WIDTH)
    steps = found.tokens.shape[1]
    assert steps == (3 if rig.head.spec.kind == "medusa" else COUNT)
    assert found.best.shape == found.shares.shape == (1, steps, WIDTH)
    assert torch.equal(found.tokens, found.best[..., 0])
    assert torch.equal(found.shares, found.shares.sort(descending=True).values)
    assert bool((found.confidences > 0).all() and (found.confidences <= 1).all())
    known = range(VOCAB) if model.target_ids is None else model.target_ids.tolist()
    assert set(found.best.flatten().tolist()) <= set(known)


def test_a_drafter_chooses_among_all_target_ids(rig: Rig) -> None:
    """The next step reads the chosen token as it would read the likeliest."""
    text = rig.text(12)
    model = rig.model()
    sequence = rig.read(model, text)
    plain = model.propose([sequence], COUNT, WIDTH)

    def ranked_from(
        first: int,
    ) -> Callable[[Sequence[Place], torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]:
        def rank(
            places: Sequence[Place], scores: torch.Tensor, width: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            found = scores.softmax(-1).topk(first + width)
            return found.indices[:, first:], found.values[:, first:]

        return rank

    assert_same(model.propose([sequence], COUNT, WIDTH, ranked_from(0)), 0, plain)
    second = model.propose([sequence], COUNT, WIDTH, ranked_from(1))
    assert second.tokens[0, 0] == plain.best[0, 0, 1]
    if rig.head.spec.confidence == "none":
        torch.testing.assert_close(second.confidences[0, 0], plain.shares[0, 0, 1])


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp", "eagle3, a window", "redrafter"])
def test_a_guess_beside_the_chain_has_the_share_that_it_has_as_a_chain(
    kind: str, tmp_path: Path
) -> None:
    rig = Rig(kind, tmp_path)
    model = rig.model()
    sequences = [model.open(rig.text(length)) for length in (12, 9)]
    model.extend([rig.extension(sequence, sequence.tokens) for sequence in sequences])
    found = model.propose(sequences, COUNT, WIDTH)
    for i, sequence in enumerate(sequences):
        branches = found.deeper[i]
        assert len({branch.at for branch in branches}) > 1
        assert max(branch.at + len(branch.run) for branch in branches) == COUNT
        for branch in branches:
            path = [*found.tokens[i, : branch.at].tolist(), *branch.run]
            assert branch.run[0] != found.tokens[i, branch.at]

            def follow(
                places: Sequence[Place], scores: torch.Tensor, width: int, path: list[int] = path
            ) -> tuple[torch.Tensor, torch.Tensor]:
                token = path[len(places[0][1])]
                return torch.tensor([[token]]), scores.softmax(-1)[:, [token]]

            alone = model.propose([sequence], len(path), 1, follow).shares[0, branch.at :, 0]
            torch.testing.assert_close(alone, torch.tensor(branch.shares), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "medusa", "redrafter"])
def test_bfloat16_gives_nearly_the_same_shares(kind: str, tmp_path: Path) -> None:
    rig = Rig(kind, tmp_path)
    text = rig.text(20)
    model = rig.model(dtype=torch.bfloat16)
    sequence = rig.read(model, text)
    found = model.propose([sequence], 1, WIDTH)
    torch.testing.assert_close(found.shares, rig.alone(text).shares[:, :1], atol=0.05, rtol=0.2)


def test_a_head_shares_the_matrices_of_its_targets_folder() -> None:
    folder = Path(__file__).parents[2] / "models/target"
    weights = target_weights(folder)
    assert weights.embeddings.shape == (4096, 384)
    assert weights.lm_head is weights.embeddings


def test_a_copy_of_the_targets_embeddings_takes_no_memory(tmp_path: Path) -> None:
    rig = Rig("peagle", tmp_path)
    own = rig.head.tensors["embed_tokens.weight"]
    # The head's own matrix is a copy, since its file may be overwritten.
    assert rig.model().embeddings is not own
    assert rig.model().embeddings.equal(own)
    rig.weights = TargetWeights(own.clone(), rig.weights.lm_head)
    assert rig.model().embeddings is rig.weights.embeddings


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_head_serves_a_wider_target_that_holds_its_own_in_its_first_columns(
    kind: str, tmp_path: Path
) -> None:
    """The wider head's weights are 0 for the further columns, so it makes the same guesses."""
    rig = Rig(kind, tmp_path / "narrow")
    config, tensors = FILES[kind]()
    wide = 24
    parts = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat(
        [torch.nn.functional.pad(part, (0, wide - 16)) for part in parts], dim=1
    )
    tensors["embed_tokens.weight"] = rig.weights.embeddings
    tensors.setdefault("lm_head.weight", rig.weights.lm_head)
    target = type(TARGET)(**{**vars(TARGET), "hidden_size": wide})
    head = read(write(tmp_path / "wide", (config, tensors)), target)
    nothing = TargetWeights(torch.zeros(VOCAB, wide), torch.zeros(VOCAB, wide))
    model = load(head, nothing, page_count=40, page_size=PAGE)
    text = rig.text(20)
    features = rig.features(text).view(-1, 3, 16)
    others = torch.randn(len(features), 3, wide - 16)
    sequence = model.open(text)
    model.extend([Extension(sequence, [], torch.cat((features, others), -1).flatten(1), 0)])
    assert_same(model.propose([sequence], COUNT, WIDTH), 0, rig.alone(text))
