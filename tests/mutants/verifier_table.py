"""The bugs that `python -m tests.mutants` plants in verification and in the draft stream."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ACCEPTANCE = "verifier_svc/verification/acceptance.py"
ROWS = "verifier_svc/verification/rows.py"
SAMPLED_RULES = "verifier_svc/verification/rules/sampled.py"
BATCH = "verifier_svc/verification/batch.py"
RULE_CHOICE = "verifier_svc/verification/rule_choice.py"
GRAMMAR_MASKS = "verifier_svc/verification/grammar_masks.py"
TRIE = "verifier_svc/state/trie.py"
EXCHANGE = "verifier_svc/drafts/exchange.py"

EXACT = ("tests/losslessness/test_exact_step.py",)
STEPS = "tests/losslessness/test_acceptance.py"
COINS = (f"{STEPS}::test_a_used_coin_decides_nothing_again",)
IN_ANY_BATCH = (f"{STEPS}::test_a_sequence_is_verified_alike_alone_and_in_any_batch",)
RULES = ("tests/verifier/test_rules.py",)
GRAMMARS = ("tests/verifier/test_grammar_masks.py",)
COUPLING = ("tests/shared/test_coupling.py",)
OUTPUT = "tests/losslessness/test_losslessness.py"
TRAFFIC = "tests/losslessness/test_traffic.py"
TRIES = "tests/verifier/test_trie.py"

VERIFIER_MUTANTS = (
    # --- verifying a draft ---
    Mutant(
        "A1",
        "coins of acceptance are the same at every step",
        ROWS,
        "return uniforms(*self._seeds_and_positions, purpose, steps)",
        "return uniforms(*self._seeds_and_positions, purpose)",
        COINS,
    ),
    Mutant(
        "A2",
        "the residual ignores block verification's scale",
        ACCEPTANCE,
        "accepted_B[short], prefixes.scale_B[short])",
        "accepted_B[short], torch.ones_like(prefixes.scale_B[short]))",
        EXACT,
    ),
    Mutant(
        "A3",
        "a draft token is accepted though nothing is allowed",
        ACCEPTANCE,
        "matches_R &= tokens_R >= 0",
        "pass",
        RULES,
    ),
    Mutant(
        "A4",
        "an empty residual has no fallback",
        ACCEPTANCE,
        "return torch.where(left.sum(-1, keepdim=True) > 0, left, target)",
        "return left",
        EXACT,
        "only rounding rejects a token where target and draft are equal",
    ),
    Mutant(
        "A5",
        "padding counts with the target's mass of id 0",
        ACCEPTANCE,
        " * (draft_SE > 0)",
        "",
        EXACT,
    ),
    Mutant(
        "A6",
        "seeds count with 32 bits",
        ROWS,
        "np.array([draft.seed for draft in self.drafts], np.uint64)",
        "np.array([draft.seed % 2**32 for draft in self.drafts], np.uint64)",
        COUPLING,
    ),
    Mutant(
        "A7",
        "the coin that rejected a token draws the recovered one",
        ACCEPTANCE,
        "rows.uniform(Purpose.RECOVER)",
        "rows.uniform(Purpose.ACCEPT)",
        EXACT,
    ),
    Mutant(
        "A8",
        "one token too many is accepted",
        ACCEPTANCE,
        "place_S < accepted_B[of_draft_S]",
        "place_S <= accepted_B[of_draft_S]",
        EXACT,
    ),
    Mutant(
        "A9",
        "noise depends on the place in the batch",
        ROWS,
        "offsets = np.arange(len(seeds)) - np.repeat(self._first_B, self._counts_B)",
        "offsets = np.arange(len(seeds))",
        IN_ANY_BATCH,
    ),
    Mutant(
        "A10",
        "one draft's rule verifies the whole batch",
        ACCEPTANCE,
        "if d.rule is rule and d.distributions and",
        "if d.distributions and",
        (*RULES, *EXACT),
        "a verifier has one rule for sampled drafts",
    ),
    Mutant(
        "R2",
        "block verification's weight is not clamped",
        SAMPLED_RULES,
        "(weight_B * ratio_B).clamp(max=1.0)",
        "weight_B * ratio_B",
        EXACT,
    ),
    Mutant(
        "R3",
        "tokens that the drafter never draws are not weighted",
        SAMPLED_RULES,
        "outside_B = weight_B * (1",
        "outside_B = (1",
        EXACT,
    ),
    Mutant(
        "R4",
        "tokens that the drafter never draws are left out",
        SAMPLED_RULES,
        "excess_B = outside_B + (weight_B",
        "excess_B = (weight_B",
        EXACT,
    ),
    Mutant(
        "R6",
        "a block ends where target and draft agree throughout",
        SAMPLED_RULES,
        "clamp(min=_TINY), 1.0)",
        "clamp(min=_TINY), 0.0)",
        EXACT,
        "where they agree, a later coin is certain to accept",
    ),
    Mutant(
        "R7",
        "block verification stops at the first coin that fails",
        SAMPLED_RULES,
        "& (drafts.lengths_B >= i)",
        "& (drafts.lengths_B >= i) & (accepted_B == i - 1)",
        EXACT,
    ),
    Mutant(
        "R8",
        "token-wise rejection goes on behind a rejection",
        SAMPLED_RULES,
        ".cumprod(-1).sum(-1)",
        ".sum(-1)",
        EXACT,
    ),
    Mutant(
        "R9",
        "token-wise rejection never accepts a token that the target likes more",
        SAMPLED_RULES,
        "< drafts.target_BK)",
        "< drafts.target_BK) & (drafts.target_BK <= drafts.draft_BK)",
        EXACT,
    ),
    Mutant(
        "J1",
        "a distribution counts from any drafter",
        BATCH,
        "asked = assignment is not None and assignment.distribution is DraftDistribution.SPARSE",
        "asked = True",
        (f"{OUTPUT}::test_an_untrusted_liar_leaves_no_trace",),
    ),
    Mutant(
        "J2",
        "coins are the same at every step, through the engine",
        ROWS,
        "lengths = [len(draft.context.tokens) for draft",
        "lengths = [0 for draft",
        (f"{TRAFFIC}::test_the_engine_uses_no_coin_twice",),
    ),
    Mutant(
        "J3",
        "penalties on the output count the prompt",
        BATCH,
        "len(request.prompt),\n            tree.token_ids",
        "0,\n            tree.token_ids",
        (f"{OUTPUT}::test_without_a_drafter_output_follows_the_target[everything]",),
    ),
    Mutant(
        "U1",
        "drafts are sampled though there is a seed",
        RULE_CHOICE,
        " and request.sampling.seed is None",
        "",
        RULES,
    ),
    Mutant(
        "U2",
        "drafters that are not trusted sample",
        RULE_CHOICE,
        "DraftDistribution.SPARSE if trusted else DraftDistribution.ONE_HOT",
        "DraftDistribution.SPARSE",
        RULES,
    ),
    Mutant(
        "U4",
        "a drafter that is not trusted gets the noise where others sample",
        RULE_CHOICE,
        "if sampled_drafts and exact",
        "if sampled_drafts and trusted and exact",
        RULES,
    ),
    Mutant(
        "U3",
        "a drafter gets the noise of a sequence that is open to samples",
        RULE_CHOICE,
        "    if wanted not in offered:\n",
        "    if wanted not in offered and DraftDistribution.COUPLED in offered:\n"
        "        return DraftDistribution.COUPLED\n"
        "    if wanted not in offered:\n",
        RULES,
    ),
    Mutant(
        "N1",
        "logits that are not finite give a token",
        ACCEPTANCE,
        "return torch.where(finite_R, tokens_R, NOT_FINITE)",
        "return tokens_R",
        RULES,
    ),
    Mutant(
        "G1",
        "no mask behind a draft that is accepted whole",
        GRAMMAR_MASKS,
        "if not allowed or matcher.ended:",
        "if not allowed or matcher.ended or row == len(draft.token_ids):",
        GRAMMARS,
    ),
    Mutant(
        "G2",
        "a sampled token that the grammar forbids is cut",
        GRAMMAR_MASKS,
        "kept = allowed.index(False) + bool(draft.distributions)",
        "kept = allowed.index(False)",
        GRAMMARS,
    ),
    # --- the draft stream ---
    Mutant(
        "T1",
        "branches beside a committed token still count",
        TRIE,
        "node.count() if forked else before - matched",
        "before - matched",
        (f"{TRIES}::test_branches_beside_a_committed_token_are_dropped",),
    ),
    Mutant(
        "T2",
        "a partly sampled path counts as sampled",
        TRIE,
        "if len(distributions) < len(nodes):",
        "if False:",
        (TRIES,),
    ),
    Mutant(
        "T3",
        "the window is counted from a proposal's base, not from the last committed token",
        TRIE,
        "self._add_child(node, proposal, i, depth, added)",
        "self._add_child(node, proposal, i, i + 1, added)",
        (f"{TRIES}::test_tokens_beyond_the_window_are_cut",),
    ),
    Mutant(
        "T4",
        "a late proposal is used though the commit contradicts it",
        TRIE,
        "(depth <= 0 and token != committed[depth - 1])",
        "(depth < 0 and token != committed[depth - 1])",
        (TRIES,),
    ),
    Mutant(
        "T5",
        "a repeated token takes the distribution that came last",
        TRIE,
        "            added.merged += 1\n",
        "            added.merged += 1\n            node.distribution = distribution\n",
        (TRIES,),
    ),
    Mutant(
        "T6",
        "each token gets the distribution of the one before it",
        TRIE,
        "proposal.distributions[i] if",
        "proposal.distributions[i - 1] if",
        (TRIES,),
    ),
    Mutant(
        "T7",
        "a skip holds beyond the next commit",
        TRIE,
        "        self.node_count = left\n        self._skipped = False\n",
        "        self.node_count = left\n",
        (TRIES,),
    ),
    Mutant(
        "W1",
        "a drafter is not sent the tokens that it missed in a pause",
        EXCHANGE,
        "sequence.tokens[assignment.sent_length :]",
        "sequence.tokens[-1:]",
        ("tests/verifier/test_waiting.py",),
    ),
)
