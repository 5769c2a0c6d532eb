"""The bugs that `python -m tests.mutants` plants: each a piece of source text, and what it becomes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ACCEPTANCE, BLOCK, TOKEN_WISE = "verifier_svc/acceptance.py", "verifier_svc/rules/block.py", "verifier_svc/rules/token_wise.py"
VERIFICATION, RULE_CHOICE, GRAMMAR_MASKS = (
    "verifier_svc/verification.py",
    "verifier_svc/rule_choice.py",
    "verifier_svc/grammar_masks.py",
)
TRIE, COMMIT, DRAFTING = "verifier_svc/trie.py", "verifier_svc/commit.py", "verifier_svc/drafting.py"
ADMISSION = "verifier_svc/admission.py"
SAMPLING, LOGITS, PAGES = "outrider/sampling.py", "outrider/logits.py", "outrider/lm/pages.py"
DRAFT_SEQUENCE, MODEL = "drafter_svc/draft_sequence.py", "drafter_svc/families/model.py"

EXACT = ("tests/losslessness/test_exact_step.py",)
COINS = ("tests/losslessness/test_acceptance.py::test_coins_that_were_looked_at_once_decide_nothing_again",)
IN_ANY_BATCH = ("tests/losslessness/test_acceptance.py::test_a_sequence_is_judged_alike_alone_and_in_any_batch",)
RULES = ("tests/verifier/test_rules.py",)
COUPLING = ("tests/shared/test_coupling.py",)
LAWS = "tests/losslessness/test_losslessness.py"
TRAFFIC = "tests/losslessness/test_traffic.py"
REAL_MODEL = ("tests/losslessness/test_model_drafter.py::test_texts_follow_the_target_behind_the_real_draft_model",)
TRIES = ("tests/verifier/test_trie.py",)
DRAFT_SEQUENCES = ("tests/drafter/test_draft_sequence.py",)
ENGINES = ("tests/verifier/test_engine.py",)
POOLS = ("tests/lm/test_pages.py",)
DRAFT_MODEL = ("tests/drafter/test_draft_model.py",)

_UNSURE = """            self._forward(drafts)
            for draft in drafts:
                law = draft.distributions[-1] if draft.distributions else None
                if law is not None and len(draft.run) > 1 and law.probabilities[law.token_ids == draft.run[-1]][0] < 0.3:
                    for gathered in (draft.run, draft.distributions, draft.others):
                        gathered.pop()
                    goals[id(draft)] = len(draft.run)
                    self._pool.truncate(draft.kv, draft.length - 1)
"""

MUTANTS = (
    # --- verifying a draft ---
    Mutant(
        "A1",
        "coins of acceptance are the same at every step",
        ACCEPTANCE,
        "return uniforms(*self._seeds_and_positions(), purpose, steps)",
        "return uniforms(*self._seeds_and_positions(), purpose)",
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
        "a draft token may stand where nothing is allowed",
        ACCEPTANCE,
        "matches_R &= tokens_R >= 0",
        "pass",
        RULES,
    ),
    Mutant(
        "A4",
        "no way out where the residual is empty",
        ACCEPTANCE,
        "return torch.where(left.sum(-1, keepdim=True) > 0, left, target)",
        "return left",
        EXACT,
        "only rounding rejects a token where target and draft are equal",
    ),
    Mutant("A5", "padding counts with the target's mass of id 0", ACCEPTANCE, " * (draft_SE > 0)", "", EXACT),
    Mutant(
        "A6",
        "seeds count with 32 bits",
        ACCEPTANCE,
        "np.array([draft.seed for draft in self.drafts], np.uint64)",
        "np.array([draft.seed % 2**32 for draft in self.drafts], np.uint64)",
        COUPLING,
    ),
    Mutant(
        "A7",
        "the coin that rejected a token draws the one instead",
        ACCEPTANCE,
        "rows.uniform(Purpose.RECOVER)",
        "rows.uniform(Purpose.ACCEPT)",
        EXACT,
    ),
    Mutant(
        "A8",
        "one token more stands than was accepted",
        ACCEPTANCE,
        "place_S < accepted_B[of_draft_S]",
        "place_S <= accepted_B[of_draft_S]",
        EXACT,
    ),
    Mutant(
        "A9",
        "noise depends on the place in the batch",
        ACCEPTANCE,
        "offsets = np.arange(len(seeds)) - np.repeat(self._first_B, self._counts_B)",
        "offsets = np.arange(len(seeds))",
        IN_ANY_BATCH,
    ),
    Mutant(
        "A10",
        "one draft's rule judges those of the whole batch",
        ACCEPTANCE,
        "if d.rule is rule and d.distributions and",
        "if d.distributions and",
        ("tests/verifier/test_rules.py", *EXACT),
        "a verifier has one rule for sampled drafts",
    ),
    Mutant(
        "R2",
        "block verification's weight is not clamped",
        BLOCK,
        "(weight_B * ratio_B).clamp(max=1.0)",
        "weight_B * ratio_B",
        EXACT,
    ),
    Mutant("R3", "what the drafter never draws is not weighted", BLOCK, "outside_B = weight_B * (1", "outside_B = (1", EXACT),
    Mutant(
        "R4", "what the drafter never draws is forgotten", BLOCK, "excess_B = outside_B + (weight_B", "excess_B = (weight_B", EXACT
    ),
    Mutant(
        "R6",
        "a block ends where target and draft agree throughout",
        BLOCK,
        "clamp(min=torch.finfo(torch.float64).tiny), 1.0)",
        "clamp(min=torch.finfo(torch.float64).tiny), 0.0)",
        EXACT,
        "where they agree a later coin is certain",
    ),
    Mutant(
        "R7",
        "block verification stops at the first coin that fails",
        BLOCK,
        "& (drafts.lengths_B >= i)",
        "& (drafts.lengths_B >= i) & (accepted_B == i - 1)",
        EXACT,
    ),
    Mutant("R8", "token-wise rejection goes on behind a rejection", TOKEN_WISE, ".cumprod(-1).sum(-1)", ".sum(-1)", EXACT),
    Mutant(
        "R9",
        "token-wise rejection never accepts what is likelier than drafted",
        TOKEN_WISE,
        "< drafts.target_BK)",
        "< drafts.target_BK) & (drafts.target_BK <= drafts.draft_BK)",
        EXACT,
    ),
    Mutant(
        "J1",
        "a distribution counts from anybody",
        VERIFICATION,
        "asked = scheduled.assignment is not None and scheduled.assignment.rule is Rule.SPARSE",
        "asked = True",
        (f"{LAWS}::test_a_liar_that_is_not_trusted_leaves_no_trace",),
    ),
    Mutant(
        "J2",
        "coins are the same at every step, through the engine",
        VERIFICATION,
        "sequence.stats.forward_count,",
        "0,",
        (f"{TRAFFIC}::test_a_coin_that_was_thrown_once_decides_nothing_again_through_the_engine",),
    ),
    Mutant(
        "J3",
        "penalties on the output take the prompt for output",
        VERIFICATION,
        "len(request.prompt),\n                path.token_ids",
        "0,\n                path.token_ids",
        (f"{LAWS}::test_without_a_drafter_output_follows_the_target[everything]",),
    ),
    Mutant("U1", "drafts are sampled though there is a seed", RULE_CHOICE, " and request.sampling.seed is None", "", RULES),
    Mutant("U2", "drafts are sampled by whoever is not trusted", RULE_CHOICE, "trusted and exact and", "exact and", RULES),
    Mutant(
        "U3",
        "a drafter is told the noise of a sequence that accepts sampled drafts",
        RULE_CHOICE,
        "return wanted if wanted in offered else Rule.ONE_HOT",
        "return next((rule for rule in (wanted, Rule.COUPLED) if rule in offered), Rule.ONE_HOT)",
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
    # --- noise and laws ---
    Mutant(
        "S1",
        "random numbers do not depend on the step",
        SAMPLING,
        "np.stack([position & _LOW, position >> _32, purposes, step])",
        "np.stack([position & _LOW, position >> _32, purposes, np.zeros_like(step)])",
        COINS,
    ),
    Mutant(
        "S2",
        "two purposes share their random numbers",
        SAMPLING,
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
        "(probs_RV[i : i + count].double() / coupled_exponentials(keys_R[i : i + count], probs_RV.shape[-1])).argmax(-1)",
        "(probs_RV[i : i + count].float() / coupled_exponentials(keys_R[i : i + count], probs_RV.shape[-1]).float()).argmax(-1)",
        COUPLING,
    ),
    Mutant("S7", "keys of noise have 32 bits", SAMPLING, "(words[0] | words[1] << _32)", "words[0]", COUPLING),
    Mutant(
        "S8",
        "the likeliest tokens are always candidates enough",
        SAMPLING,
        "return kept_RV, drop[:, -1] & (edge_R > ordered[:, -1])",
        "return kept_RV, torch.ones_like(drop[:, -1])",
        ("tests/shared/test_sampling.py::test_candidates_keep_what_all_tokens_would_whatever_ties",),
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
        "too_early = generated + i <",
        "too_early = generated <",
        ("tests/shared/test_logit_processing.py",),
    ),
    Mutant(
        "L2",
        "a drafted token is penalised at its own position",
        LOGITS,
        "for j in range(i + 1, context.row_count)",
        "for j in range(i, context.row_count)",
        ("tests/shared/test_logit_processing.py",),
    ),
    Mutant(
        "G1",
        "no mask behind a draft that stands whole",
        GRAMMAR_MASKS,
        "if not stands or matcher.ended:",
        "if not stands or matcher.ended or i + 1 == len(tokens):",
        ("tests/verifier/test_grammar_masks.py",),
    ),
    Mutant(
        "G2",
        "a sampled token that the grammar forbids is cut",
        GRAMMAR_MASKS,
        "kept = allowed + bool(scheduled.path.distributions)",
        "kept = allowed",
        ("tests/verifier/test_grammar_masks.py",),
    ),
    # --- the engine and its pages ---
    Mutant(
        "E2",
        "pages of rejected tokens are kept",
        COMMIT,
        "        if accepted < drafted:\n            self._pool.truncate(sequence.kv, sequence.kv.length)\n",
        "",
        ENGINES,
    ),
    Mutant(
        "E3",
        "keys and values of rejected tokens are kept",
        COMMIT,
        "sequence.kv.length += accepted",
        "sequence.kv.length += drafted",
        ENGINES,
    ),
    Mutant(
        "E4",
        "the verifier draws seeds of 8 bits",
        ADMISSION,
        "secrets.randbits(64)",
        "secrets.randbits(8)",
        (f"{TRAFFIC}::test_a_thousand_requests_without_a_seed_have_texts_of_their_own",),
    ),
    Mutant(
        "E5",
        "what an end cut off counts as accepted",
        COMMIT,
        "accepted = min(result.accepted_count, len(new))",
        "accepted = result.accepted_count",
        ("tests/verifier/test_counts.py",),
    ),
    Mutant(
        "W1",
        "a drafter back from a pause is not told what it missed",
        DRAFTING,
        "told = pause.end() if pause.withheld else new_token_ids",
        "told = new_token_ids",
        ("tests/verifier/test_waiting.py",),
    ),
    Mutant("P1", "a rewind goes into a page that others read", PAGES, "if published < len(sequence.digests):", "if False:", POOLS),
    Mutant("P3", "tenants share pages", PAGES, "hashlib.sha256(salt.encode()).digest()", 'hashlib.sha256(b"").digest()', POOLS),
    Mutant(
        "P4",
        "from the third page on, what precedes it does not count",
        PAGES,
        "parent = before[-1] if before else hashlib",
        "parent = before[-1] if len(before) == 1 else hashlib",
        POOLS,
    ),
    Mutant(
        "P5",
        "no token of a cached prompt is left to compute",
        PAGES,
        "most = len(token_ids) - 1 if",
        "most = len(token_ids) if",
        POOLS,
    ),
    # --- the draft stream ---
    Mutant(
        "T1",
        "what is beside a passed token still counts",
        TRIE,
        "node.count() if forked else before - matched",
        "before - matched",
        (f"{TRIES[0]}::test_what_is_beside_a_token_that_was_passed_falls",),
    ),
    Mutant(
        "T2",
        "a path that is sampled in part counts as sampled",
        TRIE,
        "distributions if len(distributions) == len(nodes) else []",
        "distributions",
        TRIES,
    ),
    Mutant(
        "T3",
        "the window is counted from a proposal's base, not from the last committed token",
        TRIE,
        "self._hang(node, token, depth,",
        "self._hang(node, token, i + 1,",
        (f"{TRIES[0]}::test_what_the_window_has_no_room_for_is_cut",),
    ),
    Mutant(
        "T4",
        "a late proposal is used though the commit contradicts it",
        TRIE,
        "if depth <= 0 and token != committed[depth - 1]:",
        "if depth < 0 and token != committed[depth - 1]:",
        TRIES,
    ),
    Mutant(
        "T5",
        "a repeated token takes the distribution that came last",
        TRIE,
        "            added.merged += 1\n",
        "            added.merged += 1\n            node.distribution = distribution\n",
        TRIES,
    ),
    Mutant(
        "T6",
        "each token gets the distribution of the one before it",
        TRIE,
        "given[i] if given else None",
        "given[i - 1] if given else None",
        TRIES,
    ),
    Mutant(
        "T7",
        "a skip holds beyond the next commit",
        TRIE,
        "self._favourites = node, left, False, None",
        "self._favourites = node, left, self._skipped, None",
        TRIES,
    ),
    Mutant(
        "C1",
        "branches do not move along with a commit",
        DRAFT_SEQUENCE,
        "(at - matched, token): branch",
        "(at, token): branch",
        DRAFT_SEQUENCES,
    ),
    Mutant(
        "C2",
        "of a branch that was committed one token is passed over, not all",
        DRAFT_SEQUENCE,
        "branch.tokens[len(tokens) :]",
        "branch.tokens[1:]",
        DRAFT_SEQUENCES,
    ),
    Mutant(
        "C3",
        "a repeated chain has its distributions beside other tokens",
        DRAFT_SEQUENCE,
        "[None] * (count - len(self._unsent)) + self._unsent",
        "self._unsent + [None] * (count - len(self._unsent))",
        DRAFT_SEQUENCES,
    ),
    # --- the draft model ---
    Mutant("D1", "the draft model draws twice with one number", MODEL, "draft.draw_count += 1", "pass", DRAFT_MODEL),
    Mutant(
        "D2",
        "the draft model draws from another law than it claims",
        MODEL,
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
        DRAFT_MODEL,
    ),
    Mutant(
        "D5",
        "outcomes are sampled, and count as the likeliest",
        MODEL,
        "greedy = self.chain.opened.sampling.greedy or (self.at is not None and self.chain.opened.rule is Rule.SPARSE)",
        "greedy = self.chain.opened.sampling.greedy",
        ("tests/drafter/test_draft_branches.py",),
    ),
    Mutant("D6", "the draft model drops tokens it is unsure of", MODEL, "            self._forward(drafts)\n", _UNSURE, REAL_MODEL),
)
