"""Committed tokens follow the target's distribution with any drafts."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from chi_square import LEAST_P, Comparison, compare
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.messages import AcceptanceRule, SamplingParams
from outrider.sampling.logits import Context
from outrider.sampling.noise import Purpose, uniforms
from verifier_svc.verification.acceptance import accept
from verifier_svc.verification.draft import AcceptResult, Draft

VOCAB = 5
DRAWS = 12_000
SEES = 0.035
"""The bias that so many draws see, as a total variation distance of two tokens' distribution."""
SAMPLED = SamplingParams(temperature=1.0)
Table = npt.NDArray[np.float64]

# A target and drafters with one token of context: row t is the distribution after token t.
TARGET: Table = np.random.default_rng(0).dirichlet(np.ones(VOCAB) * 0.7, VOCAB)
CLOSE: Table = 0.7 * TARGET + 0.3 * np.random.default_rng(1).dirichlet(np.ones(VOCAB), VOCAB)
REVERSED: Table = TARGET[:, ::-1].copy()
# The target throws a fair coin, and the drafter takes it for a loaded one. Here the end of a block
# reveals the most about the coins behind it.
EVEN: Table = np.tile([0.5, 0.5, 0.0, 0.0, 0.0], (VOCAB, 1))
HEADS: Table = np.tile([0.9, 0.1, 0.0, 0.0, 0.0], (VOCAB, 1))


def make_draft(
    sampling: SamplingParams,
    seed: int,
    position: int,
    tokens: Sequence[int] = (),
    distributions: Sequence[SparseDistribution] = (),
    rule: AcceptanceRule = AcceptanceRule.TOKEN_WISE,
) -> Draft:
    """A draft behind `position` committed tokens; `rule` applies if it has distributions."""
    if not distributions:
        rule = AcceptanceRule.GREEDY if sampling.greedy else AcceptanceRule.COUPLED
    context = Context(sampling, [0] * position, drafted=tokens)
    return Draft(context, seed, rule, distributions)


def draw(
    table: Table, contexts: npt.NDArray[np.int64], numbers: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    return (table[contexts].cumsum(-1) > numbers[:, None]).argmax(-1)


def generate(
    target: Table,
    drafter: Table,
    draft_tokens: int,
    *,
    sparse: bool,
    length: int = 2,
    rule: AcceptanceRule = AcceptanceRule.TOKEN_WISE,
    draws: int = DRAWS,
) -> npt.NDArray[np.int64]:
    """`draws` sequences of `length` tokens, [draws, length], generated behind token 0.

    Each step verifies `draft_tokens`: sampled ones if `sparse`, else the drafter's likeliest.
    """
    rng = np.random.default_rng(draft_tokens)
    done: list[list[int]] = [[] for _ in range(draws)]
    while unfinished := [i for i, tokens in enumerate(done) if len(tokens) < length]:
        drafts: list[Draft] = []
        rows: list[npt.NDArray[np.float64]] = []
        for i in unfinished:
            context = [0, *done[i]][-1]
            tokens: list[int] = []
            distributions: list[SparseDistribution] = []
            for _ in range(draft_tokens):
                draft_probs = drafter[[context, *tokens][-1]]
                if sparse:
                    tokens.append(int(draft_probs.cumsum().searchsorted(rng.random(), "right")))
                    distributions.append(SparseDistribution(np.arange(VOCAB), draft_probs))
                else:
                    tokens.append(int(draft_probs.argmax()))
            rows += [target[token] for token in (context, *tokens)]
            drafts.append(make_draft(SAMPLED, i, len(done[i]), tokens, distributions, rule))
        logits = torch.from_numpy(np.log(np.array(rows) + 1e-300)).float()
        for i, draft, result in zip(unfinished, drafts, accept(logits, drafts), strict=True):
            done[i] += [*draft.context.drafted[: result.accepted_count], result.next_token]
    return np.array([tokens[:length] for tokens in done])


def against_enumeration(samples: npt.NDArray[np.int64], target: Table) -> Comparison:
    """Compare the joint distribution of two tokens after token 0 with exact enumeration."""
    expected = np.array(
        [target[0, a] * target[a, b] for a, b in itertools.product(range(VOCAB), repeat=2)]
    )
    observed = np.bincount(samples[:, 0] * VOCAB + samples[:, 1], minlength=VOCAB**2)
    return compare(observed, expected * len(samples))


# test_exact_step.py enumerates one step. Here steps follow one another, with the real noise.
@pytest.mark.parametrize("draft_tokens", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("sparse", [False, True], ids=["one-hot", "sparse"])
@pytest.mark.parametrize(
    "drafter",
    [
        CLOSE,
        pytest.param(REVERSED, marks=pytest.mark.slow),
        pytest.param(TARGET, marks=pytest.mark.slow),
    ],
    ids=["close", "reversed", "equal"],
)
def test_sampled_output_follows_the_target(drafter: Table, sparse: bool, draft_tokens: int) -> None:
    samples = generate(TARGET, drafter, draft_tokens, sparse=sparse)
    against_enumeration(samples, TARGET).must_agree(SEES)


def test_sampled_output_without_a_draft_follows_the_target() -> None:
    against_enumeration(generate(TARGET, CLOSE, 0, sparse=False), TARGET).must_agree(SEES)


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN_WISE, AcceptanceRule.BLOCK])
@pytest.mark.parametrize("draft_tokens", [1, 2, 4])
def test_a_used_coin_decides_nothing_again(rule: AcceptanceRule, draft_tokens: int) -> None:
    samples = generate(EVEN, HEADS, draft_tokens, sparse=True, rule=rule)
    against_enumeration(samples, EVEN).must_agree(SEES)


def test_a_draft_on_a_forbidden_token_changes_nothing() -> None:
    target = TARGET.copy()
    target[:, 2] = 0
    target /= target.sum(1, keepdims=True)
    forbidden = np.full((VOCAB, VOCAB), 1e-3 / (VOCAB - 1))
    forbidden[:, 2] = 1 - 1e-3
    samples = generate(target, forbidden, 2, sparse=True)
    assert (samples != 2).all()
    against_enumeration(samples, target).must_agree(SEES)


def reused_uniform(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, purpose: Purpose, steps: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    return uniforms(seeds, positions, Purpose.ACCEPT)


def test_noise_shared_by_two_purposes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier_svc.verification.rows.uniforms", reused_uniform)
    assert against_enumeration(generate(TARGET, CLOSE, 2, sparse=True), TARGET).p < LEAST_P


def test_a_draft_equal_to_the_target_is_accepted_whole() -> None:
    rng = np.random.default_rng(5)
    drafts: list[Draft] = []
    rows: list[npt.NDArray[np.float64]] = []
    for i in range(500):
        tokens = [0]
        for _ in range(4):
            tokens.append(int(rng.choice(VOCAB, p=TARGET[tokens[-1]])))
        rows += [TARGET[t] for t in tokens]
        distributions = [SparseDistribution(np.arange(VOCAB), TARGET[t]) for t in tokens[:-1]]
        drafts.append(make_draft(SAMPLED, i, 0, tokens[1:], distributions))
    results = accept(torch.from_numpy(np.log(np.array(rows))), drafts)
    assert np.mean([result.accepted_count for result in results]) > 3.99


def test_rejection_sampling_accepts_at_one_minus_total_variation() -> None:
    tokens = draw(CLOSE, np.zeros(DRAWS, np.int64), np.random.default_rng(2).random(DRAWS))
    claim = SparseDistribution(np.arange(VOCAB), CLOSE[0])
    drafts = [make_draft(SAMPLED, i, 0, [int(token)], [claim]) for i, token in enumerate(tokens)]
    rows = np.stack([TARGET[[0] * DRAWS], TARGET[tokens]], 1).reshape(-1, VOCAB)
    results = accept(torch.from_numpy(np.log(rows)), drafts)
    rate = np.mean([result.accepted_count for result in results])
    assert rate == pytest.approx(1 - abs(TARGET[0] - CLOSE[0]).sum() / 2, abs=0.02)


@st.composite
def batches(make: Callable[..., object]) -> tuple[list[Draft], torch.Tensor]:
    lengths = make(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    seed = make(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    drafts: list[Draft] = []
    rows: list[npt.NDArray[np.float64]] = []
    for i, length in enumerate(lengths):
        sampling = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.integers(0, 4)),
            top_p=float(rng.choice([1, 0.8])),
        )
        draft_probs = rng.dirichlet(np.ones(VOCAB), length)
        tokens = [int(rng.choice(VOCAB, p=probs)) for probs in draft_probs]
        distributions: list[SparseDistribution] = []
        if rng.random() < 0.5:
            distributions = [SparseDistribution(np.arange(VOCAB), probs) for probs in draft_probs]
        drafts.append(make_draft(sampling, int(rng.integers(2**63)), 10 * i, tokens, distributions))
        rows.append(rng.normal(size=(length + 1, VOCAB)))
    return drafts, torch.from_numpy(np.concatenate(rows)).float()


@given(batches())
@settings(max_examples=60)
def test_a_sequence_is_verified_alike_alone_and_in_any_batch(
    batch: tuple[list[Draft], torch.Tensor],
) -> None:
    drafts, logits = batch
    together = accept(logits, drafts)
    row = 0
    for draft, result in zip(drafts, together, strict=True):
        rows = logits[row : row + len(draft.context.drafted) + 1]
        assert accept(rows, [draft]) == [result]
        row += len(draft.context.drafted) + 1


@given(st.lists(st.integers(0, VOCAB - 1), max_size=5), st.integers(0, 2**32))
@settings(max_examples=40)
def test_greedy_commits_the_argmax_chain(tokens: list[int], seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(tokens) + 1, VOCAB)))
    best = logits.argmax(-1).tolist()
    [result] = accept(logits, [make_draft(SamplingParams(temperature=0), 0, 0, tokens)])
    matched = next((i for i, token in enumerate(tokens) if token != best[i]), len(tokens))
    assert result == AcceptResult(matched, best[matched])


def test_a_seed_gives_the_same_tokens_with_any_one_hot_drafter() -> None:
    plain = generate(TARGET, CLOSE, 0, sparse=False, length=4, draws=2_000)
    assert (generate(TARGET, CLOSE, 3, sparse=False, length=4, draws=2_000) == plain).all()
    assert (generate(TARGET, REVERSED, 2, sparse=False, length=4, draws=2_000) == plain).all()
