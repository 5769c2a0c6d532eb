"""All bugs that `python -m tests.mutants` plants: a piece of source text and its replacement."""

from __future__ import annotations

from tests.mutants.budgets import BUDGETS
from tests.mutants.mutant import Mutant

ACCEPTANCE = "verifier_svc/verification/acceptance.py"
COMMIT = "verifier_svc/engine/commit.py"
DRAFT_TREES = "verifier_svc/policy/draft_trees.py"
EXCHANGE = "verifier_svc/drafts/exchange.py"
FORWARDS = "drafter_svc/families/forwards.py"
FINGERPRINT = "outrider/lm/weights_fingerprint.py"
GRAMMARS = "drafter_svc/families/grammar.py"
GUESS_TREE = "outrider/drafter/guess_tree.py"
KEY_SLOTS = "gateway/generation/key_slots.py"
LOOP = "verifier_svc/engine/loop.py"
PAGES = "outrider/lm/pages.py"
ROWS = "verifier_svc/verification/rows.py"
RULE_CHOICE = "verifier_svc/verification/rule_choice.py"
SAMPLED_RULES = "verifier_svc/verification/rules/sampled_drafts.py"
SCHEDULER = "verifier_svc/engine/scheduler.py"
SHARED_PAGES = "drafter_svc/families/shared_pages.py"
TRIE = "verifier_svc/state/trie.py"
WAITS = "verifier_svc/policy/waits.py"

DRAFT_SEQUENCES = ("tests/drafter/test_draft_sequence.py",)
ENGINES = "tests/verifier/test_engine.py"
EXACT = ("tests/losslessness/test_exact_step.py",)
IN_ANY_BATCH = (
    "tests/losslessness/test_reference.py::test_a_sequence_is_verified_alike_alone_and_in_any_batch",
)
LATE_MASKS = "tests/verifier/test_late_masks.py"
GRAMMAR_FAMILY = "tests/drafter/test_grammar_family.py"
OTHER_VOCABULARIES = "tests/drafter/test_other_vocabulary.py"
PARALLEL = "tests/drafter/test_parallel_drafts.py"
POOLS = ("tests/lm/test_pages.py",)
RULES = ("tests/verifier/test_rules.py",)
SAMPLED_LENGTHS = "tests/verifier/test_sampled_lengths.py"
TENANTS_PAGES = (
    "tests/drafter/test_shared_draft_model.py::test_tenants_share_no_pages_of_the_draft_model",
)
TREES = "tests/losslessness/test_tree_losslessness.py"
TRIES = "tests/verifier/test_trie.py"
WORLDS = ("tests/simulator/test_worlds.py::test_the_worlds_of_fixed_seeds_keep_every_invariant",)

MUTANTS = (
    # --- acceptance ---
    Mutant(
        "A2",
        "the residual ignores block verification's scale",
        ACCEPTANCE,
        "self._residual(target_SV, cut_B, prefixes.scale_B)",
        "self._residual(target_SV, cut_B, torch.ones_like(prefixes.scale_B))",
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
        "depths: np.ndarray = np.arange(len(first_R)) - first_R",
        "depths: np.ndarray = np.arange(len(first_R))",
        IN_ANY_BATCH,
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
        "K6",
        "the walk takes no child but the first",
        "verifier_svc/verification/tree_walk.py",
        "for child in below[row]:",
        "for child in below[row][:1]:",
        (f"{TREES}::test_a_batch_of_trees_and_chains_accepts_what_the_reference_does",),
    ),
    # --- acceptance rules ---
    Mutant(
        "R2",
        "block verification's weight is not clamped",
        SAMPLED_RULES,
        "(weight_B * ratio_B).clamp(max=1.0)",
        "weight_B * ratio_B",
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
        "U2",
        "drafters that are not trusted sample",
        RULE_CHOICE,
        "DraftDistribution.SPARSE if trusted else DraftDistribution.ONE_HOT",
        "DraftDistribution.SPARSE",
        RULES,
    ),
    # --- the trie ---
    Mutant(
        "T1",
        "branches beside a committed token still count",
        TRIE,
        "node.count() if forked else before - matched",
        "before - matched",
        (f"{TRIES}::test_branches_beside_a_committed_token_are_dropped",),
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
        "Q6",
        "the trie of a sequence that is opened late begins where the sequence was assigned",
        EXCHANGE,
        "            assignment.trie = Trie(length, assignment.trie.window)\n",
        "",
        ("tests/verifier/test_hostile_drafts.py",),
    ),
    # --- pages of the cache ---
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
        "E2",
        "pages of rejected tokens are kept",
        COMMIT,
        "        if accepted < drafted:\n"
        "            self._pool.truncate(sequence.kv, sequence.kv.num_computed_tokens)\n",
        "",
        (ENGINES,),
    ),
    # --- the scheduler ---
    Mutant(
        "Q4",
        "the oldest sequence is preempted",
        SCHEDULER,
        "(held[each.request.tenant], each.arrival))",
        "(held[each.request.tenant], -each.arrival))",
        (f"{ENGINES}::test_the_youngest_of_a_tenants_sequences_is_preempted",),
    ),
    Mutant(
        "Q5",
        "a draft for which no page is free counts for its drafter",
        SCHEDULER,
        "        if not draft.token_ids:\n            assignment = None\n",
        "",
        (f"{ENGINES}::test_a_draft_for_which_no_page_is_free_is_not_counted_for_its_drafter",),
    ),
    Mutant(
        "Q7",
        "sampled chains do not count in the room that trees share",
        DRAFT_TREES,
        "                self._taken += min(len(best.trie.main_path), depth)\n",
        "",
        ("tests/verifier/test_tree_building.py",),
    ),
    Mutant(
        "X6",
        "a preempted sequence keeps its pages",
        SCHEDULER,
        "        self.pool.free(victim.kv)\n        self._leave",
        "        self._leave",
        WORLDS,
    ),
    Mutant(
        "X12",
        "several prompts get the last token of a step's room",
        SCHEDULER,
        "            spare -= count\n            planned",
        "            spare -= count if count > 1 else 0\n            planned",
        WORLDS,
    ),
    Mutant(
        "X13",
        "a step of several tenants is charged to one of them",
        SCHEDULER,
        "next(iter(tenants)) if len(tenants) == 1 else None",
        "next(iter(tenants))",
        ("tests/verifier/test_step_shares.py::test_each_tenant_pays_for_its_rows_of_a_step",),
    ),
    Mutant(
        "X14",
        "a tenant that would keep as many pages as another loses none to it",
        SCHEDULER,
        "if held[most] < own:",
        "if held[most] <= own:",
        (
            "tests/verifier/test_fairness.py::"
            "test_a_tenant_that_loses_pages_keeps_as_many_as_the_other_gets",
        ),
    ),
    # --- grammars with slow masks ---
    Mutant(
        "M1",
        "a text whose request ignores ends goes on after its grammar's end",
        COMMIT,
        " or not self._eos_token_ids.isdisjoint(new)",
        "",
        (f"{LATE_MASKS}::test_a_text_ends_with_its_grammar_even_if_ends_are_ignored",),
    ),
    Mutant(
        "M2",
        "masks of an unread answer have no budget",
        LOOP,
        "[*self.scheduler.running.values(), *unread]",
        "list(self.scheduler.running.values())",
        (f"{LATE_MASKS}::test_an_unread_answer_ends_when_its_masks_have_used_up_their_budget",),
    ),
    # --- forwards that overflow, weights, slow readers ---
    Mutant(
        "O1",
        "a drafter that joins after an overflow drafts for its sequence",
        LOOP,
        "        scheduled.sequence.max_draft_tokens = 0\n",
        "",
        (
            "tests/verifier/test_overflows.py::"
            "test_after_an_overflow_no_drafter_drafts_for_the_sequence",
        ),
    ),
    Mutant(
        "W1",
        "the fingerprint of a checkpoint depends on the beginnings of its tensors alone",
        FINGERPRINT,
        "[last * i // (_SAMPLES - 1) for i in range(_SAMPLES)]",
        "[_SAMPLE_BYTES * i for i in range(_SAMPLES)]",
        ("tests/lm/test_weights_fingerprint.py",),
    ),
    Mutant(
        "S1",
        "a paused producer goes on only when its reader has read everything",
        "outrider/process/network/read_ahead.py",
        "len(self) <= _FEW_UNREAD",
        "len(self) == 0",
        ("tests/shared/test_read_ahead.py",),
    ),
    # --- the length of a sampled draft ---
    Mutant(
        "Q18",
        "the wait for another draft looks at the length of a sampled path",
        WAITS,
        "there = assignment.ready_tokens(draft_tokens)",
        "there = min(len(assignment.trie.main_path), draft_tokens)",
        (f"{SAMPLED_LENGTHS}::test_no_wait_depends_on_the_length_of_a_sampled_draft",),
    ),
    Mutant(
        "Q19",
        "a draft that has too few free pages is dropped instead of cut",
        SCHEDULER,
        "draft = draft.first(max(0, self.pool.room(kv) - end))",
        "draft = NO_DRAFT",
        (f"{SAMPLED_LENGTHS}::test_of_a_sampled_draft_a_full_cache_verifies_what_fits",),
    ),
    # --- the drafter library ---
    Mutant(
        "C1",
        "branches do not move along with a commit",
        GUESS_TREE,
        "{at - matched: found",
        "{at: found",
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
    Mutant(
        "Q15",
        "the unsent guesses of a committed branch are not sent",
        GUESS_TREE,
        "self.unsent = [None for guess in path if guess.unsent]",
        "self.unsent = []",
        ("tests/drafter/test_guess_trees.py",),
    ),
    # --- drafter families ---
    Mutant(
        "D1",
        "a draft model with another vocabulary guesses tokens that it lacks",
        FORWARDS,
        'picked.masked_fill_(self._missing, float("-inf"))',
        "picked",
        (f"{OTHER_VOCABULARIES}::test_a_token_that_the_draft_model_lacks_is_never_its_likeliest",),
    ),
    Mutant(
        "D2",
        "guesses go on after a token that the draft model did not go on with",
        FORWARDS,
        "guesses[: goes_on.index(False) + 1]",
        "guesses",
        (f"{OTHER_VOCABULARIES}::test_guesses_are_the_likeliest_that_both_vocabularies_have",),
    ),
    Mutant(
        "D3",
        "a PARD model's text after which nothing may follow is not read again",
        FORWARDS,
        "                draft.kv.num_computed_tokens -= not found\n",
        "",
        (f"{PARALLEL}::test_a_round_after_one_without_any_guess_guesses_as_usual",),
    ),
    Mutant(
        "D4",
        "a PARD model computes beyond its context",
        FORWARDS,
        "if end >= self._runner.context_length or",
        "if",
        (f"{PARALLEL}::test_no_forward_goes_beyond_the_models_context",),
    ),
    Mutant(
        "D5",
        "a forced text that is cut within a word is guessed in the cut word's tokens",
        GRAMMARS,
        "tokens[: sum(end <= most for end in ends)]",
        "tokens[:-1]",
        (
            f"{GRAMMAR_FAMILY}::"
            "test_of_a_text_longer_than_a_guess_every_guessed_token_is_the_whole_texts",
        ),
    ),
    Mutant(
        "D6",
        "a forced text goes on after another text's guesses",
        GRAMMARS,
        "if [each.token for each in main[:held]] != sequence.guesses:",
        "if False:",
        (f"{GRAMMAR_FAMILY}::test_guesses_that_outlive_a_commit_are_not_joined_to_another_text",),
    ),
    Mutant(
        "D7",
        "a class of forced tokens that are mostly wrong is offered",
        GRAMMARS,
        "self.rates[each.of] < _LEAST), None)",
        "False), None)",
        (f"{GRAMMAR_FAMILY}::test_what_is_mostly_wrong_is_not_offered_until_it_is_right_again",),
    ),
    Mutant(
        "D8",
        "a head's draft goes on after a place where every token is forbidden",
        "drafter_svc/families/head_worker.py",
        "takewhile(lambda pair",
        "filter(lambda pair",
        (
            "tests/heads/test_head_family.py::"
            "test_a_draft_ends_where_grammar_and_bans_leave_no_token",
        ),
    ),
    # --- tenants ---
    Mutant(
        "Q2",
        "pages of a prompt's chunk are cached for no tenant",
        COMMIT,
        "            return\n"
        "        self._pool.cache_pages(sequence.kv, sequence.tokens, sequence.request.tenant)\n",
        '            return\n        self._pool.cache_pages(sequence.kv, sequence.tokens, "")\n',
        (f"{ENGINES}::test_pages_of_a_prompt_belong_to_its_tenant",),
    ),
    Mutant(
        "Q8",
        "a request whose client leaves keeps its key's slots",
        KEY_SLOTS,
        "        finally:\n            self.taken[key.id] -= count\n",
        "        finally:\n            self.taken[key.id] -= 0\n",
        ("tests/gateway/test_key_slots.py",),
    ),
    Mutant(
        "Q9",
        "the draft model's pages are cached for no tenant",
        FORWARDS,
        "cache_pages(draft.kv, draft.committed, draft.sequence.opened.tenant)",
        'cache_pages(draft.kv, draft.committed, "")',
        TENANTS_PAGES,
    ),
    Mutant(
        "Q10",
        "the draft model looks up the pages of no tenant",
        SHARED_PAGES,
        "self._pool.match_prefix(sequence, token_ids, salt)",
        'self._pool.match_prefix(sequence, token_ids, "")',
        TENANTS_PAGES,
    ),
    Mutant(
        "Q11",
        "all tenants' grammars are compiled in one turn",
        GRAMMARS,
        "matcher_async(grammar, output, sequence.opened.tenant)",
        'matcher_async(grammar, output, "")',
        (f"{GRAMMAR_FAMILY}::test_one_tenants_grammars_that_compile_for_long_delay_no_others",),
    ),
    # --- answers ---
    Mutant(
        "Y1",
        "text that might begin a stop string is lost before a call",
        "gateway/text/text_stream.py",
        "                text = self._scanner.finish()\n",
        '                text = ""\n',
        (
            "tests/gateway/test_text.py::"
            "test_what_might_begin_a_stop_string_comes_before_the_call_that_follows",
        ),
    ),
    # --- vLLM ---
    Mutant(
        "V1",
        "the ids of a padded row count as a draft",
        "verifier_svc/vllm/hub.py",
        "if drafted and drafted[0] < 0:",
        "if drafted and drafted[0] < -1:",
        ("tests/verifier/test_vllm_hub.py::test_the_ids_of_a_padded_row_count_in_no_measure",),
    ),
    Mutant(
        "V2",
        "vLLM's tokens are drawn with the noise of the next position",
        "verifier_svc/vllm/noise.py",
        "else range(length)",
        "else range(length + 1)",
        ("tests/verifier/test_vllm_noise.py",),
    ),
    Mutant(
        "V3",
        "a draft takes pages that vLLM's plain steps need",
        "verifier_svc/vllm/scheduler.py",
        "            if wanted > spare:",
        "            if False:",
        (
            "tests/verifier/test_vllm_scheduler.py::"
            "test_drafts_get_only_pages_that_nobody_else_needs",
        ),
    ),
    Mutant(
        "V4",
        "a head gets the hidden states of rejected drafts in vLLM",
        "verifier_svc/vllm/outcome.py",
        "        return count\n",
        "        return len(self.drafted)\n",
        (
            "tests/verifier/test_vllm_features.py::"
            "test_rejected_drafts_and_padded_rows_have_no_features",
        ),
    ),
    *BUDGETS,
)
