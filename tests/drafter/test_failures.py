"""In every family, a failure for one sequence costs only that sequence its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_svc.families.base import Family
from drafter_svc.families.draft_model import DraftModel
from drafter_svc.families.model import ModelFamily
from drafter_svc.families.ngram import NgramFamily
from drafter_svc.families.suffix import SuffixFamily, SuffixSettings
from drafter_svc.pools.memory import NgramOptions
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import Opened, Skip, Window
from outrider.protocol.messages import DraftDistribution, SamplingParams
from outrider.tokenizer import load_tokenizer
from tests.family_rig import GREEDY, Rig, opened_sequence

MODEL = str(Path(__file__).parents[2] / "models/draft")
REPEATING = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]
WINDOW = Window(32, 8)


def opened(
    sequence_id: int,
    tokens: list[int],
    sampling: SamplingParams = GREEDY,
    distribution: DraftDistribution = DraftDistribution.ONE_HOT,
    **more: Any,
) -> Opened:
    more |= {"sampling": sampling, "distribution": distribution, "prompt_length": len(tokens)}
    return opened_sequence(sequence_id, tokens, WINDOW, 4, **more)


@pytest.fixture(scope="module")
def grammars(runner: ModelRunner) -> GrammarCompiler:
    return GrammarCompiler(MODEL, runner.vocab_size, runner.eos_token_ids, trusted=True)


@pytest.fixture
def make_model(
    runner: ModelRunner, thread: ThreadPoolExecutor, grammars: GrammarCompiler
) -> Callable[[], ModelFamily]:
    model = DraftModel(runner, thread, grammars=grammars)
    return lambda: ModelFamily(model, runner.vocab_size, branch_count=0)


@pytest.fixture(params=["model", "ngram", "suffix"])
def family(request: pytest.FixtureRequest) -> Family:
    if request.param == "model":
        made: ModelFamily = request.getfixturevalue("make_model")()
        return made
    if request.param == "ngram":
        return NgramFamily(NgramOptions(), 1000)
    pytest.importorskip("arctic_inference", reason="the package is missing: make suffix")
    return SuffixFamily(SuffixSettings())


def break_one(family: Family, monkeypatch: pytest.MonkeyPatch, sequence_id: int) -> None:
    """Make the family's work for this sequence raise an error."""
    if isinstance(family, ModelFamily):
        runner = family._model.runner
        tokens = set(family._drafts[sequence_id].sequence.tokens)

        def breaking(work: Callable[..., Any]) -> Callable[..., Any]:
            def call(slices: Sequence[SequenceSlice], *more: Any) -> Any:
                if any(tokens.issuperset(part.token_ids) for part in slices):
                    raise ZeroDivisionError("planted")
                return work(slices, *more)

            return call

        monkeypatch.setattr(runner, "forward", breaking(runner.forward))
        monkeypatch.setattr(runner, "continue_greedily", breaking(runner.continue_greedily))
    elif isinstance(family, NgramFamily):
        text = family._texts[sequence_id]
        monkeypatch.setattr(text, "pool", None)
    else:
        assert isinstance(family, SuffixFamily)
        monkeypatch.setattr(family._texts[sequence_id], "trees", None)


async def test_a_failing_sequence_loses_its_drafts_and_no_other_does(
    family: Family, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = [token + 100 for token in REPEATING]
    rig = Rig(family)
    rig.open(opened(1, REPEATING))
    await rig.drafts()
    expected = rig.guesses(1)
    rig.close(1)
    assert expected
    for sequence_id in (2, 4, 5):
        rig.open(opened(sequence_id, [token + sequence_id for token in other]))
    rig.open(opened(3, REPEATING))
    break_one(family, monkeypatch, 4)
    drafts = await rig.drafts()
    assert rig.abandoned == {4}
    assert rig.guesses(3) == expected
    assert {proposal.sequence_id for proposal in drafts.proposals} == {2, 3, 5}
    assert Skip(4, len(other)) in drafts.skips
    assert caplog.text.count("is not drafted for") == 1
    assert "Traceback" in caplog.text
    # After each verdict the session sends a skip for this sequence, without asking the family.
    rig.commit(4, 1)
    rig.commit(3, expected[0] + 1)
    assert Skip(4, len(other) + 1) in (await rig.drafts()).skips
    rig.close(4)
    await rig.drafts()
    assert not rig.abandoned


SAMPLED = SamplingParams(temperature=1.0)


def seed_of(distribution: DraftDistribution) -> int | None:
    """Return a seed for coupled requests, None for others."""
    return 7 if distribution is DraftDistribution.COUPLED else None


@pytest.mark.parametrize("distribution", list(DraftDistribution))
async def test_guessing_ends_where_every_token_is_forbidden(
    make_model: Callable[[], ModelFamily], distribution: DraftDistribution
) -> None:
    """The choice is "abz", and tokens with the letter z are banned: nothing may follow "ab"."""
    tokenizer = load_tokenizer(MODEL)
    last = tuple(
        token for token in range(tokenizer.get_vocab_size()) if "z" in tokenizer.decode([token])
    )
    rig = Rig(make_model())
    choice = Grammar(GrammarKind.CHOICE, choices=("abz",))
    sampling = SamplingParams(
        temperature=1.0,
        seed=seed_of(distribution),
        banned_token_ids=last,
    )
    rig.open(opened(1, REPEATING, sampling, distribution, grammar=choice))
    drafts = await rig.drafts()
    guessed = rig.guesses(1)
    assert tokenizer.decode(guessed) == "ab"
    assert drafts.skips == [Skip(1, len(REPEATING))]
    # The guesses after the first stay valid after the next verdict, but no token may follow them.
    rig.commit(1, guessed[0])
    assert (await rig.drafts()).skips == [Skip(1, len(REPEATING) + 1)]
    assert rig.guesses(1) == guessed[1:]


async def test_nothing_is_guessed_from_logits_that_are_not_finite(
    make_model: Callable[[], ModelFamily], runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = runner.forward

    def overflowing(slices: Sequence[SequenceSlice]) -> torch.Tensor:
        logits_RV = forward(slices).clone()
        logits_RV[0] = float("nan")
        return logits_RV

    monkeypatch.setattr(runner, "forward", overflowing)
    rig = Rig(make_model())
    rig.open(opened(1, REPEATING, SAMPLED, DraftDistribution.SPARSE))
    rig.open(opened(2, REPEATING, SAMPLED, DraftDistribution.SPARSE))
    await rig.draft()
    assert rig.guesses(1) == []
    assert rig.guesses(2)
    assert not rig.abandoned
