"""The bugs that `python -m tests.mutants` plants on the drafters' side."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GUESS_TREE, MODEL = "outrider/drafter/guess_tree.py", "drafter_svc/families/model.py"
FORWARDS, CACHED_DRAFT = "drafter_svc/families/forwards.py", "drafter_svc/families/cached_draft.py"
DRAFT_SEQUENCES = ("tests/drafter/test_draft_sequence.py",)
DRAFT_SAMPLING = ("tests/drafter/test_draft_sampling.py",)
REAL_MODEL = (
    "tests/losslessness/test_model_drafter.py::test_texts_follow_the_target_behind_the_real_draft_model",
)

_UNSURE = """            self._forward(drafts)
            for draft in drafts:
                tree = draft.sequence._tree
                guesses, unsent = tree.chain, tree.unsent
                distribution = unsent[-1] if unsent else None
                if distribution is None or len(guesses) < 2:
                    continue
                if distribution.probabilities[distribution.token_ids == guesses[-1]][0] >= 0.3:
                    continue
                for gathered in (guesses, tree.confidences, unsent, draft.alternatives):
                    gathered.pop()
                draft.goal = draft.guess_count
                self._pool.truncate(draft.kv, draft.length - 1)
"""

DRAFTER_MUTANTS = (
    Mutant(
        "C1",
        "branches do not move along with a commit",
        GUESS_TREE,
        "{at - matched: found",
        "{at: found",
        DRAFT_SEQUENCES,
    ),
    Mutant(
        "C2",
        "a commit of several tokens of a branch drops only the first",
        GUESS_TREE,
        "for token in tokens:",
        "for token in tokens[:1]:",
        DRAFT_SEQUENCES,
    ),
    Mutant(
        "C3",
        "a repeated chain has its distributions beside other tokens",
        GUESS_TREE,
        "[None] * (count - len(self.unsent)) + self.unsent",
        "self.unsent + [None] * (count - len(self.unsent))",
        DRAFT_SEQUENCES,
    ),
    # --- the draft model ---
    Mutant(
        "D1",
        "the draft model draws twice with one number",
        CACHED_DRAFT,
        "self.draw_count += len(distributions)",
        "pass",
        DRAFT_SAMPLING,
    ),
    Mutant(
        "D2",
        "the draft model draws from another distribution than it claims",
        FORWARDS,
        "picks = inverse_cdf(top_RE,",
        "picks = inverse_cdf(top_RE**1.3,",
        REAL_MODEL,
    ),
    Mutant(
        "D3",
        "a sequence's number is the seed of its drafts",
        MODEL,
        "else secrets.randbits(64)",
        "else opened.sequence_id",
        DRAFT_SAMPLING,
    ),
    Mutant(
        "D5",
        "branches are sampled, and count as the likeliest",
        CACHED_DRAFT,
        "if self.at is not None and opened.distribution is DraftDistribution.SPARSE:",
        "if False:",
        ("tests/drafter/test_draft_branches.py",),
    ),
    Mutant(
        "D6",
        "the draft model drops tokens it is unsure of",
        FORWARDS,
        "            self._forward(drafts)\n",
        _UNSURE,
        REAL_MODEL,
    ),
)
