"""The batched rules accept what the reference accepts, with the same random numbers."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.messages import AcceptanceRule, SamplingParams, SpeculationOptions
from outrider.sampling.logits import Context
from verifier_svc.verification import reference
from verifier_svc.verification.acceptance import accept
from verifier_svc.verification.draft import Draft

VOCAB = 6
# No ratio of small integers, so that no probability lies on a bound, where rounding decides.
EPSILON = 0.3007
TOPK = 3
DELTA = 0.2003
OPTIONS = SpeculationOptions(typical_epsilon=EPSILON, relaxed_topk=TOPK, relaxed_delta=DELTA)
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
    """Rows of float32 probabilities, as the verifier has them; some of them are 0."""
    numbers = draw(st.lists(st.integers(0, 40), min_size=rows * VOCAB, max_size=rows * VOCAB))
    weights = np.array(numbers, np.float32).reshape(rows, VOCAB)
    weights[:, 0] += weights.sum(-1) == 0
    logits = torch.from_numpy(weights).log()
    return logits.softmax(-1).double().numpy()


@st.composite
def situations(draw: st.DrawFn) -> tuple[Probs, Probs, list[int], reference.Coins]:
    """Target and draft probabilities, a draft drawn from these, and a step's random numbers."""
    count = draw(st.integers(1, 5))
    target = draw(distributions(count + 1))
    drafter = draw(distributions(count))
    draft = [draw(st.sampled_from(np.flatnonzero(row).tolist())) for row in drafter]
    coins = reference.Coins(draw(st.integers(0, 2**64 - 1)), draw(st.integers(1, 50)))
    return target, drafter, draft, coins


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=200, deadline=None)
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
