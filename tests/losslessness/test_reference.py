"""With equal random numbers, the batched rules accept the tokens that the reference accepts.

A sequence gets the same result by itself and in any batch.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.messages import AcceptanceRule, SamplingParams, SpeculationOptions
from outrider.sampling.context import Context
from tests.accepting import accept
from tests.losslessness import reference
from verifier_svc.verification.draft import Draft

VOCAB = 6
# Not a ratio of small integers: a probability must not lie on a bound, where rounding decides.
EPSILON = 0.3007
TOPK = 3
DELTA = 0.2003
OPTIONS = SpeculationOptions(typical_epsilon=EPSILON, relaxed_top_k=TOPK, relaxed_delta=DELTA)
Probs = npt.NDArray[np.float64]
Rule = Callable[[Probs, Probs, list[int], reference.Coins], reference.Accepted]

RULES: dict[AcceptanceRule, Rule] = {
    AcceptanceRule.GREEDY: lambda target, _, draft, coins: reference.greedy(target, draft),
    AcceptanceRule.COUPLED: lambda target, _, draft, coins: reference.coupled(target, draft, coins),
    AcceptanceRule.TOKEN_WISE: reference.token_wise,
    AcceptanceRule.BLOCK: reference.block,
    AcceptanceRule.TYPICAL: lambda target, _, draft, coins: reference.typical(
        target, draft, coins, EPSILON
    ),
    AcceptanceRule.RELAXED: lambda target, _, draft, coins: reference.relaxed(
        target, draft, coins, TOPK, DELTA
    ),
}


@st.composite
def distributions(draw: st.DrawFn, rows: int) -> Probs:
    """Return rows of float32 probabilities, as the verifier has them; some of them are 0."""
    numbers = draw(st.lists(st.integers(0, 40), min_size=rows * VOCAB, max_size=rows * VOCAB))
    weights = np.array(numbers, np.float32).reshape(rows, VOCAB)
    weights[:, 0] += weights.sum(-1) == 0
    logits = torch.from_numpy(weights).log()
    return logits.softmax(-1).double().numpy()


@st.composite
def situations(draw: st.DrawFn) -> tuple[Probs, Probs, list[int], reference.Coins]:
    """Return target and draft probabilities, a draft drawn from the latter, and random numbers."""
    count = draw(st.integers(1, 5))
    target = draw(distributions(count + 1))
    drafter = draw(distributions(count))
    draft = [draw(st.sampled_from(np.flatnonzero(row).tolist())) for row in drafter]
    coins = reference.Coins(draw(st.integers(0, 2**64 - 1)), draw(st.integers(1, 50)))
    return target, drafter, draft, coins


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=100)
@given(batch=st.lists(situations(), min_size=1, max_size=4))
def test_a_batch_accepts_what_the_reference_accepts(
    rule: AcceptanceRule, batch: list[tuple[Probs, Probs, list[int], reference.Coins]]
) -> None:
    sampling = SamplingParams(temperature=0.0 if rule is AcceptanceRule.GREEDY else 1.0)
    is_sampled = rule in (AcceptanceRule.TOKEN_WISE, AcceptanceRule.BLOCK)
    drafts: list[Draft] = []
    rows: list[Probs] = []
    expected: list[tuple[int, int]] = []
    for target, drafter, draft, coins in batch:
        claims = [
            SparseDistribution(np.flatnonzero(row), row[np.flatnonzero(row)]) for row in drafter
        ]
        context = Context(sampling, [0] * coins.position, drafted=draft)
        distributions = claims if is_sampled else ()
        drafts.append(Draft(context, coins.seed, rule, distributions, OPTIONS))
        rows += list(target)
        accepted = RULES[rule](target, drafter, draft, coins)
        expected.append((accepted.count, accepted.next_token))
    logits = torch.from_numpy(np.log(np.maximum(np.array(rows), 1e-300))).float()
    logits[torch.from_numpy(np.array(rows) == 0)] = -torch.inf
    found = accept(logits, drafts)
    assert [(result.accepted_count, result.next_token) for result in found] == expected


@st.composite
def batches(make: st.DrawFn) -> tuple[list[Draft], torch.Tensor]:
    """Return random drafts, with and without distributions, and their logits."""
    lengths = make(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    rng = np.random.default_rng(make(st.integers(0, 2**32)))
    drafts: list[Draft] = []
    rows: list[Probs] = []
    for i, length in enumerate(lengths):
        sampling = SamplingParams(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.integers(0, 4)),
            top_p=float(rng.choice([1, 0.8])),
        )
        draft_probs = rng.dirichlet(np.ones(VOCAB), length)
        tokens = [int(rng.choice(VOCAB, p=probs)) for probs in draft_probs]
        context = Context(sampling, [0] * 10 * i, drafted=tokens)
        rule = AcceptanceRule.GREEDY if sampling.greedy else AcceptanceRule.COUPLED
        distributions: list[SparseDistribution] = []
        if rng.random() < 0.5 and length:
            rule = AcceptanceRule.TOKEN_WISE
            distributions = [SparseDistribution(np.arange(VOCAB), probs) for probs in draft_probs]
        drafts.append(Draft(context, int(rng.integers(2**63)), rule, distributions))
        rows.append(rng.normal(size=(length + 1, VOCAB)))
    return drafts, torch.from_numpy(np.concatenate(rows)).float()


@given(batches())
@settings(max_examples=60)
def test_a_sequence_is_verified_alike_alone_and_in_any_batch(
    batch: tuple[list[Draft], torch.Tensor],
) -> None:
    drafts, logits = batch
    row = 0
    for draft, result in zip(drafts, accept(logits, drafts), strict=True):
        rows = logits[row : row + len(draft.context.drafted) + 1]
        assert accept(rows, [draft]) == [result]
        row += len(draft.context.drafted) + 1
