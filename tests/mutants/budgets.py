"""Bugs that remove a limit on what a tenant or a drafter costs other tenants and drafters."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

COMPILER = "outrider/grammar/compiler.py"
LANES = "verifier_svc/verification/mask_lanes.py"
ROSTER = "verifier_svc/drafts/roster.py"

COMPILING = "tests/shared/test_grammar_compiler.py"
LATE_MASKS = "tests/verifier/test_late_masks.py"
FAIRNESS = "tests/verifier/test_fairness.py"
PAGE = "tests/gateway/test_page_api.py"
STRANGERS = "tests/verifier/test_strangers.py"
UNREAD = "tests/verifier/test_unread_answers.py"

BUDGETS = (
    Mutant(
        "B1",
        "the masks of a request have no budget",
        LANES,
        "if sequence.mask_excess_s + pending_s > self._seconds:",
        "if False:",
        (f"{LATE_MASKS}::test_a_request_ends_when_its_masks_have_used_up_their_budget",),
    ),
    Mutant(
        "B2",
        "the masks of a tenant have no budget",
        LANES,
        "if used_s <= most:",
        "if True:",
        (f"{LATE_MASKS}::test_a_tenants_budget_is_that_of_five_requests_and_comes_back",),
    ),
    Mutant(
        "B3",
        "all tenants' slow masks are computed in one turn",
        LANES,
        "self._slow.submit(tenant, work.run)",
        'self._slow.submit("", work.run)',
        (f"{LATE_MASKS}::test_masks_in_progress_delay_neither_another_tenants_nor_slow_ones",),
    ),
    Mutant(
        "B4",
        "a tenant's grammars compile on several threads",
        COMPILER,
        '"grammar", each=1,',
        '"grammar",',
        (f"{COMPILING}::test_slow_grammars_of_tenants_leave_threads_to_the_others",),
    ),
    Mutant(
        "B5",
        "tenants that have used up their time share all threads",
        "outrider/process/workers/tenant_threads.py",
        "slow_count < self._most_slow or not is_slow(tenant)",
        "True",
        (
            "tests/shared/test_tenant_threads.py::"
            "test_tenants_that_used_up_their_budgets_leave_threads_to_the_others",
        ),
    ),
    Mutant(
        "B6",
        "the check of a grammar's texts may take as long as its compilation",
        "outrider/grammar/guard.py",
        "GUARD_SECONDS = 0.3",
        "GUARD_SECONDS = 5.0",
        (f"{COMPILING}::test_a_grammar_holds_whose_check_never_ends",),
    ),
    Mutant(
        "B7",
        "a message of skips counts as one skip",
        "verifier_svc/state/drafter.py",
        "self.skips_left -= len(batch.skips)",
        "self.skips_left -= bool(batch.skips)",
        (
            "tests/verifier/test_hostile_drafts.py::"
            "test_more_answers_than_a_drafter_was_told_messages_are_a_violation",
        ),
    ),
    Mutant(
        "B8",
        "a tenant has any number of streams of events",
        "gateway/http/page.py",
        "if self._open[account] >= MOST_FEEDS:",
        "if False:",
        (f"{PAGE}::test_a_tenant_has_a_few_streams_of_events_and_others_have_their_own",),
    ),
    Mutant(
        "B9",
        "each stream of events has a state of its own",
        "gateway/http/page.py",
        "if now - made_at >= most_age_s:",
        "if True:",
        (f"{PAGE}::test_streams_of_equal_rights_share_an_encoded_state",),
    ),
    Mutant(
        "B10",
        "a tenant keeps all places that it has",
        "verifier_svc/engine/scheduler.py",
        "if count <= self.tenants[tenant] + 1:",
        "if True:",
        (f"{FAIRNESS}::test_a_tenant_with_one_request_takes_a_place_from_a_flood_at_once",),
    ),
    Mutant(
        "B11",
        "other tenants make the steps of a light tenant as long as they like",
        "verifier_svc/engine/step_shares.py",
        "room_s = _ADDED * fill.seconds",
        "pass",
        (
            "tests/verifier/test_step_shares.py::"
            "test_floods_add_a_quarter_to_the_steps_of_a_light_tenant",
        ),
    ),
    Mutant(
        "B12",
        "any number of answers may be unread",
        "verifier_svc/engine/sequence_book.py",
        "if len(self.unread) <= self._max_waiting:",
        "if True:",
        (f"{UNREAD}::test_of_too_many_unread_the_tenant_with_the_most_loses_its_longest_unread",),
    ),
    Mutant(
        "B13",
        "an unread sequence keeps its place",
        "verifier_svc/engine/loop.py",
        "        self.scheduler.remove(sequence)\n        self.drafting.close(sequence)\n",
        "        self.drafting.close(sequence)\n",
        (f"{UNREAD}::test_unread_sequences_of_tenants_leave_all_places_to_another",),
    ),
    Mutant(
        "B14",
        "a drafter that never answers is told of each step",
        "verifier_svc/state/drafter.py",
        "return self.told_steps >= patience",
        "return False",
        (f"{STRANGERS}::test_silent_drafters_get_few_messages_and_no_wait",),
    ),
    Mutant(
        "B15",
        "one holder's drafters may take all places",
        ROSTER,
        "if drafter.source and len(own) >= max(1, int(_SOURCE_SHARE * self.max_drafters)):",
        "if False:",
        (
            f"{STRANGERS}::"
            "test_a_holder_of_too_many_drafters_is_refused_by_the_limits_name_and_others_join",
        ),
    ),
    Mutant(
        "B16",
        "a tenant's conversations take several of the workers for chat templates",
        "gateway/text/templates.py",
        '"chat-template", each=1,',
        '"chat-template",',
        (
            "tests/gateway/test_prompts.py::"
            "test_a_template_that_hangs_ends_at_its_limit_and_delays_no_other",
        ),
    ),
    Mutant(
        "B17",
        "a thought's line breaks are read again for each piece",
        "gateway/tools/reader.py",
        "            certain = _held_from(self._buffer, marks)\n"
        "            self._add_reasoning(self._buffer[:certain], parts)\n",
        '            certain = len(self._buffer.rstrip("\\n"))\n'
        "            self._add_reasoning(self._buffer[:certain], parts)\n",
        (
            "tests/gateway/test_reading_is_linear.py::"
            "test_twice_the_pieces_take_about_twice_the_time",
        ),
    ),
)
