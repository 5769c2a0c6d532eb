"""The bugs that `python -m tests.mutants` plants for random worlds with faults to notice."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DRAFT_MESSAGE = "verifier_svc/drafts/draft_message.py"
EXCHANGE = "verifier_svc/drafts/exchange.py"
SCHEDULER = "verifier_svc/engine/scheduler.py"

WORLDS = ("tests/simulator/test_worlds.py::test_the_worlds_of_fixed_seeds_keep_every_invariant",)

FAULT_MUTANTS = (
    Mutant(
        "X1",
        "tokens for a sequence that is over are not counted as stale",
        DRAFT_MESSAGE,
        ("            self.stale_count += count\n            return\n"),
        "            return\n",
        WORLDS,
    ),
    Mutant(
        "X2",
        "a draft for a sequence that has ended is a violation",
        DRAFT_MESSAGE,
        ("        if sequence is None:\n            return None\n        assignment"),
        (
            "        if sequence is None:\n"
            '            raise OutriderError(Reason.PROTOCOL_VIOLATION, "late", field_name)\n'
            "        assignment"
        ),
        WORLDS,
    ),
    Mutant(
        "X3",
        "a sequence keeps its assignment to a drafter that left",
        EXCHANGE,
        "            sequence.assignments.pop(drafter.id, None)\n",
        "",
        WORLDS,
    ),
    Mutant(
        "X4",
        "a sequence that ends keeps its drafter's slot",
        EXCHANGE,
        "    assignment.drafter.sequence_ids.discard(sequence.id)\n",
        "",
        WORLDS,
    ),
    Mutant(
        "X5",
        "drafters do not hear of a sequence's end",
        EXCHANGE,
        "assignment.drafter.outbox.closed.append(Closed(sequence.id))",
        "pass",
        WORLDS,
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
        "X7",
        "a rewind goes on in a page that others may read",
        "outrider/lm/pages.py",
        (
            "            length = cached * self.page_size\n"
            "            del sequence.digests[cached:]\n"
        ),
        "            pass\n",
        WORLDS,
    ),
    Mutant(
        "X8",
        "a trie takes more tokens than its window has",
        "verifier_svc/state/trie.py",
        "depth > self.window.depth or self.node_count >= self.window.token_count",
        "depth > self.window.depth",
        WORLDS,
    ),
    Mutant(
        "X9",
        "accepted branches are not moved behind the text in the cache",
        "verifier_svc/engine/loop.py",
        "        if sources:\n",
        "        if not sources:\n",
        WORLDS,
    ),
    Mutant(
        "X10",
        "a resumed request begins again at its prompt",
        "verifier_svc/engine/intake.py",
        "tokens=[*request.prompt, *request.committed]",
        "tokens=[*request.prompt]",
        WORLDS,
    ),
    Mutant(
        "X11",
        "a cancelled sequence stays in the queue",
        SCHEDULER,
        (
            "            self.waiting.remove(sequence)\n"
            "        self.pool.free(sequence.kv)\n"
            "\n"
            "    def _leave"
        ),
        "            pass\n        self.pool.free(sequence.kv)\n\n    def _leave",
        WORLDS,
    ),
    Mutant(
        "X12",
        "several prompts get the last token of a step's room",
        SCHEDULER,
        ("                spare -= count\n            if count == 0:\n                continue\n"),
        (
            "                spare -= count if count > 1 else 0\n"
            "            if count == 0:\n"
            "                continue\n"
        ),
        WORLDS,
    ),
    Mutant(
        "X13",
        "a step under a clock that was set back counts as one without duration",
        "verifier_svc/policy/speculation_budget.py",
        "decode_step_s == 0.0 or seconds == 0.0",
        "decode_step_s == 0.0",
        WORLDS,
    ),
)
