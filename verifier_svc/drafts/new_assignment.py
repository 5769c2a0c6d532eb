"""Makes a sequence's assignment to a drafter, and decides how far ahead a drafter may run."""

from __future__ import annotations

import math

from outrider.protocol.draft_messages import Window
from outrider.protocol.limits import MAX_DRAFT_TOKENS
from verifier_svc.state.acceptance_rate import AcceptanceRate, SiblingRates
from verifier_svc.state.drafter import LONG_MEMORY, Drafter
from verifier_svc.state.sequence import RUN_CLASSES, Assignment, Sequence
from verifier_svc.state.trie import Trie
from verifier_svc.verification.rule_choice import choose_distribution

# A drafter may be ahead by two drafts: the path that is being verified, its bonus token, and the
# path after that token.
_AHEAD = 2
_TOKENS_PER_DEPTH = 6
# Prior acceptance of a drafter. The prior is high, because the verifier would never try a drafter
# whose acceptance started low.
_OPTIMISM = 0.8
_KNOWN_POSITIONS = 16


def new_assignment(sequence: Sequence, drafter: Drafter, sampled_drafts: bool) -> Assignment:
    """Return a new assignment; the drafter has not been told of it yet.

    `sampled_drafts` says whether the verifier accepts sampled drafts at all.
    """
    limit = sequence.max_draft_tokens
    reach = min(_AHEAD * limit + 1, drafter.hello.max_draft_tokens)
    length = len(sequence.tokens)
    trie = Trie(length, Window(token_count=_TOKENS_PER_DEPTH * reach, depth=reach))
    distribution = choose_distribution(
        sequence.request,
        drafter.hello.distributions,
        sampled_drafts=sampled_drafts,
        trusted=drafter.trusted,
    )
    kind = _kind(sequence)
    drafter_rates = drafter.rates.get(kind)
    if drafter_rates is None:
        drafter_rates = drafter.rates[kind] = [
            AcceptanceRate(_OPTIMISM, _KNOWN_POSITIONS, decay=LONG_MEMORY)
            for _ in range(RUN_CLASSES)
        ]
    return Assignment(
        drafter,
        trie,
        distribution,
        [AcceptanceRate(rate, limit) for rate in drafter_rates],
        drafter_rates,
        trie.window,
        draft_tokens=1,
        sent_length=length,
        answer_rate=drafter.answer_rate,
        lengths=AcceptanceRate(drafter.lengths, limit),
        sibling_rates=drafter.sibling_rates.setdefault(kind, SiblingRates()),
    )


def _kind(sequence: Sequence) -> tuple[bool, bool, bool]:
    """Return the kind of traffic: whether the request is greedy, has a grammar, has a prediction.

    A drafter's acceptance should be similar for all sequences of one kind.
    """
    request = sequence.request
    return request.sampling.greedy, request.grammar is not None, bool(request.prediction)


def run_ahead_window(
    assignment: Assignment, draft_tokens: int, step_s: float, tree_tokens: int = 0
) -> Window:
    """Return how far a drafter may run ahead.

    The drafter is asked for `draft_tokens`, or for a tree of `tree_tokens`. If the trie has room,
    the window covers this draft, and a further draft for each step until the next verdict reaches
    the drafter. A step takes `step_s` seconds. For a drafter on the target's device the window
    covers only this draft, since running ahead would slow down the forward. For a probe, for which
    `draft_tokens` is 0, the window covers one token.
    """
    drafter = assignment.drafter
    most = assignment.trie.window
    if draft_tokens == 0 or drafter.on_target_device:
        reach = max(draft_tokens, 1)
        token_count = max(reach, min(tree_tokens, most.token_count))
    else:
        steps = MAX_DRAFT_TOKENS
        if step_s > 0.0:
            steps = 1 + math.ceil(drafter.round_trip.value / step_s)
        reach = min((1 + steps) * (1 + draft_tokens) - 1, most.depth)
        token_count = min(_TOKENS_PER_DEPTH * reach, most.token_count)
    before = assignment.window
    if before.depth == reach and before.token_count == token_count:
        return before
    return Window(token_count, reach)
