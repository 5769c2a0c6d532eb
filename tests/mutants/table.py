"""All bugs that `python -m tests.mutants` plants: a piece of source text and its replacement.

`verifier_table` has the bugs of verification and the draft stream, `tree_table` those of trees,
`drafter_table` those of drafters, `service_table` those that tenants, clients and drafters see, and
`fault_table` those that random worlds notice. This file has sampling, noise, the engine and its
pages.
"""

from __future__ import annotations

from tests.mutants.drafter_table import DRAFTER_MUTANTS
from tests.mutants.fault_table import FAULT_MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.service_table import SERVICE_MUTANTS
from tests.mutants.tree_table import TREE_MUTANTS
from tests.mutants.verifier_table import COINS, COUPLING, TRAFFIC, VERIFIER_MUTANTS

COMMIT = "verifier_svc/engine/commit.py"
INTAKE = "verifier_svc/engine/intake.py"
SAMPLING = "outrider/sampling/sampler.py"
NOISE = "outrider/sampling/noise.py"
LOGITS = "outrider/sampling/logits.py"
PAGES = "outrider/lm/pages.py"

ENGINES = ("tests/verifier/test_engine.py",)
POOLS = ("tests/lm/test_pages.py",)

MUTANTS = (
    *VERIFIER_MUTANTS,
    *TREE_MUTANTS,
    *FAULT_MUTANTS,
    *SERVICE_MUTANTS,
    # --- noise and laws ---
    Mutant(
        "S1",
        "random numbers do not depend on the step",
        NOISE,
        "np.stack([position & _LOW, position >> _32, purposes, step])",
        "np.stack([position & _LOW, position >> _32, purposes, np.zeros_like(step)])",
        COINS,
    ),
    Mutant(
        "S2",
        "two purposes share their random numbers",
        NOISE,
        "np.full_like(position, int(purpose))",
        "np.full_like(position, 3)",
        ("tests/shared/test_sampling.py::test_two_purposes_share_no_noise",),
    ),
    Mutant(
        "S5",
        "a token without weight is drawn at the edge",
        SAMPLING,
        "torch.searchsorted(cumulative, point, right=True)",
        "torch.searchsorted(cumulative, point)",
        ("tests/shared/test_sampling.py::test_inverse_cdf_never_returns_a_token_without_weight",),
    ),
    Mutant(
        "S6",
        "the race is run in float32",
        SAMPLING,
        "scores = probs.double() / coupled_exponentials(keys, vocab_size)",
        "scores = probs.float() / coupled_exponentials(keys, vocab_size).float()",
        COUPLING,
    ),
    Mutant(
        "S7",
        "keys of noise have 32 bits",
        NOISE,
        "(words[0] | words[1] << _32)",
        "words[0]",
        COUPLING,
    ),
    Mutant(
        "S8",
        "the likeliest tokens are always candidates enough",
        SAMPLING,
        "return kept_RV, drop[:, -1] & (edge_R > ordered[:, -1])",
        "return kept_RV, torch.ones_like(drop[:, -1])",
        (
            "tests/shared/test_sampling.py::test_truncation_by_candidates_equals_truncation_by_all_tokens",
        ),
    ),
    Mutant(
        "S11",
        "u of the noise is rounded to 1 where it is largest",
        SAMPLING,
        "(state >> 12).bitwise_and_(2**52 - 1)\n    return bits.double().add_(0.5).mul_(2.0**-52)",
        "(state >> 11).bitwise_and_(2**53 - 1)\n    return bits.double().add_(0.5).mul_(2.0**-53)",
        COUPLING,
    ),
    Mutant(
        "S9",
        "noise of a token is that of its neighbour",
        SAMPLING,
        "torch.arange(1, vocab_size + 1,",
        "torch.arange(vocab_size,",
        COUPLING,
    ),
    Mutant(
        "L1",
        "min_tokens counts from the draft's beginning",
        LOGITS,
        "too_early = generated + depth <",
        "too_early = generated <",
        ("tests/shared/test_logit_processing.py",),
    ),
    Mutant(
        "L2",
        "a drafted token is penalised at its own position",
        LOGITS,
        "for row, before in enumerate(context.drafted_before())",
        "for row, before in enumerate([*context.drafted_before()[1:], []])",
        ("tests/shared/test_logit_processing.py",),
    ),
    # --- the engine and its pages ---
    Mutant(
        "E2",
        "pages of rejected tokens are kept",
        COMMIT,
        "        if accepted < drafted:\n"
        "            self._pool.truncate(sequence.kv, sequence.kv.num_computed_tokens)\n",
        "",
        ENGINES,
    ),
    Mutant(
        "E3",
        "keys and values of rejected tokens are kept",
        COMMIT,
        "sequence.kv.num_computed_tokens += accepted",
        "sequence.kv.num_computed_tokens += drafted",
        ENGINES,
    ),
    Mutant(
        "E4",
        "the verifier draws seeds of 8 bits",
        INTAKE,
        "secrets.randbits(64)",
        "secrets.randbits(8)",
        (f"{TRAFFIC}::test_a_thousand_requests_without_a_seed_have_different_texts",),
    ),
    Mutant(
        "E5",
        "draft tokens beyond the end of a text count as accepted",
        COMMIT,
        "accepted = min(result.accepted_count, len(new))",
        "accepted = result.accepted_count",
        ("tests/verifier/test_counts.py",),
    ),
    Mutant(
        "P1",
        "a rewind goes into a page that others read",
        PAGES,
        "if cached < len(sequence.digests):",
        "if False:",
        POOLS,
    ),
    Mutant(
        "P3",
        "tenants share pages",
        PAGES,
        "hashlib.sha256(salt.encode()).digest()",
        'hashlib.sha256(b"").digest()',
        POOLS,
    ),
    Mutant(
        "P4",
        "from the third page on, a page counts without those before it",
        PAGES,
        "parent = before[-1] if before else hashlib",
        "parent = before[-1] if len(before) == 1 else hashlib",
        POOLS,
    ),
    Mutant(
        "P5",
        "no token of a cached prompt is left to compute",
        PAGES,
        "most = len(token_ids) - 1",
        "most = len(token_ids)",
        POOLS,
    ),
    *DRAFTER_MUTANTS,
)
