"""The bugs of `table` that are planted in the verification of trees."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RULES = "tests/losslessness/test_tree_losslessness.py"
STEPS = "tests/verifier/test_tree_steps.py"

TREE_MUTANTS = (
    Mutant(
        "K1",
        "noise of a tree's row depends on its place in the tree",
        "verifier_svc/verification/rows.py",
        "offsets[first : first + draft.context.row_count] = draft.context.depths",
        "pass",
        (f"{RULES}::test_a_batch_of_trees_and_chains_accepts_what_the_reference_does",),
    ),
    Mutant(
        "K2",
        "penalties count a token's siblings",
        "outrider/sampling/logits.py",
        "found.append([*found[parent], token])",
        "found.append([*found[-1], token])",
        (f"{RULES}::test_a_row_of_a_tree_has_the_settings_of_its_path",),
    ),
    Mutant(
        "K3",
        "keys and values of the accepted path stay where they are",
        "verifier_svc/engine/loop.py",
        "self.model.move_tokens(sources, targets)",
        "pass",
        (f"{RULES}::test_a_seed_gives_the_same_text_with_any_trees",),
    ),
    Mutant(
        "K4",
        "a token's mask counts the siblings before it",
        "verifier_svc/verification/grammar_masks.py",
        "            matcher.rollback(left)",
        "            pass",
        (f"{STEPS}::test_a_grammar_cuts_a_tree_and_masks_each_row_as_its_path",),
    ),
    Mutant(
        "K5",
        "log probabilities are those of a tree's first rows",
        "verifier_svc/verification/batch.py",
        "rows += [first, *[first + row for row in path]]",
        "rows += range(first, first + len(path) + 1)",
        (f"{STEPS}::test_trees_change_no_answer_of_any_setting",),
    ),
    Mutant(
        "K6",
        "the walk takes no child but the first",
        "verifier_svc/verification/tree_walk.py",
        "for child in below[row]:",
        "for child in below[row][:1]:",
        (f"{RULES}::test_a_batch_of_trees_and_chains_accepts_what_the_reference_does",),
    ),
    Mutant(
        "K7",
        "a thinking phase begins beside the token that begins it",
        "verifier_svc/verification/batch.py",
        "inside = (inside_rows[parent] and token != end) or token == begin",
        "inside = (inside_rows[-1] and token != end) or token == begin",
        (f"{STEPS}::test_the_thinking_phase_of_a_token_is_that_of_its_path",),
    ),
)
