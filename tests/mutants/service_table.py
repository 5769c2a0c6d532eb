"""The bugs that `python -m tests.mutants` plants in what tenants, clients and drafters see."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BATCH = "verifier_svc/verification/batch.py"
COMMIT = "verifier_svc/engine/commit.py"
SCHEDULER = "verifier_svc/engine/scheduler.py"
EXCHANGE = "verifier_svc/drafts/exchange.py"
DRAFT_TREES = "verifier_svc/policy/draft_trees.py"
LIMITS = "gateway/access/limits.py"
FORWARDS = "drafter_svc/families/forwards.py"
SHARED_PAGES = "drafter_svc/families/shared_pages.py"
DRAFT_MODEL = "drafter_svc/families/model.py"
NGRAM = "drafter_svc/families/ngram.py"
MEMORY_POOL = "drafter_svc/pools/memory.py"
GRAMMAR_STATE = "drafter_svc/grammar_state.py"
GUESS_TREE = "outrider/drafter/guess_tree.py"

ENGINES = "tests/verifier/test_engine.py"
BRANCHES = "tests/drafter/test_draft_branches.py"
TENANTS_PAGES = (
    "tests/drafter/test_shared_draft_model.py::test_tenants_share_no_pages_of_the_draft_model",
)

SERVICE_MUTANTS = (
    Mutant(
        "Q1",
        "rows of log probabilities forget the sequences that want none",
        BATCH,
        "        first += len(scheduled.draft.token_ids) + 1\n",
        "            first += len(scheduled.draft.token_ids) + 1\n",
        ("tests/losslessness/test_logprobs.py",),
    ),
    Mutant(
        "Q2",
        "pages of a prompt's chunk are cached for no tenant",
        COMMIT,
        "            return\n"
        "        self._pool.cache_pages(sequence.kv, sequence.tokens, sequence.request.tenant)\n",
        '            return\n        self._pool.cache_pages(sequence.kv, sequence.tokens, "")\n',
        (f"{ENGINES}::test_pages_of_a_prompts_chunk_belong_to_its_tenant",),
    ),
    Mutant(
        "Q3",
        "the end of a grammar does not end the text",
        COMMIT,
        "                    finish_reason = FinishReason.STOP\n",
        "                    pass\n",
        ("tests/verifier/test_grammar_masks.py",),
    ),
    Mutant(
        "Q4",
        "the oldest sequence is preempted",
        SCHEDULER,
        "(held[each.request.tenant], each.id))",
        "(held[each.request.tenant], -each.id))",
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
        "Q6",
        "the trie of a sequence that is opened late begins where the sequence was assigned",
        EXCHANGE,
        "            assignment.trie = Trie(length, assignment.trie.window)\n",
        "",
        ("tests/verifier/test_hostile_drafts.py",),
    ),
    Mutant(
        "Q7",
        "sampled chains do not count in the room that trees share",
        DRAFT_TREES,
        "                self._taken += best.trie.length(depth)\n",
        "",
        ("tests/verifier/test_tree_building.py",),
    ),
    Mutant(
        "Q8",
        "tokens beyond a reservation count in the minute of the reservation",
        LIMITS,
        "windows.now()[0] if difference > 0 else taken.minute",
        "taken.minute",
        ("tests/gateway/test_limits.py",),
    ),
    Mutant(
        "Q9",
        "the draft model's pages are cached for no tenant",
        FORWARDS,
        "draft.sequence.tokens, draft.sequence.opened.tenant)",
        'draft.sequence.tokens, "")',
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
        "a drafter's grammar is not rolled back when guesses change",
        GRAMMAR_STATE,
        "        matcher.rollback(len(self._accepted) - common)\n",
        "",
        ("tests/drafter/test_grammar_state.py",),
    ),
    Mutant(
        "Q12",
        "the draft model's branch is looked up by the first committed token",
        DRAFT_MODEL,
        "draft.branches.get((kept, new[kept]))",
        "draft.branches.get((kept, new[0]))",
        (f"{BRANCHES}::test_a_committed_branch_brings_its_cache",),
    ),
    Mutant(
        "Q13",
        "the draft model's alternatives do not move along with a commit",
        DRAFT_MODEL,
        "            del draft.alternatives[: len(new)]\n",
        "            pass\n",
        (f"{BRANCHES}::test_alternatives_stay_at_their_places_when_guesses_are_committed",),
    ),
    Mutant(
        "Q14",
        "the draft model's branch shares the page of the token that it replaces",
        DRAFT_MODEL,
        "self._pool.fork(draft.kv, len(sequence.tokens) + at)",
        "self._pool.fork(draft.kv, len(sequence.tokens) + at + 1)",
        (f"{BRANCHES}::test_a_branch_at_the_end_of_a_page_has_a_page_of_its_own",),
    ),
    Mutant(
        "Q15",
        "the unsent guesses of a committed branch are not sent",
        GUESS_TREE,
        "self.unsent = [None for guess in path if guess.unsent]",
        "self.unsent = []",
        ("tests/drafter/test_guess_trees.py",),
    ),
    Mutant(
        "Q16",
        "different tokenizers share the public pool of n-grams",
        NGRAM,
        "                    info.tokenizer_fingerprint, MemoryPool",
        '                    "", MemoryPool',
        ("tests/ngram/test_ngram_family.py",),
    ),
    Mutant(
        "Q17",
        "n-grams that were used again are evicted first",
        MEMORY_POOL,
        "        self._occurrences.move_to_end(ngram)\n",
        "        self._occurrences.move_to_end(ngram, last=False)\n",
        ("tests/ngram/test_memory_pool.py",),
    ),
)
