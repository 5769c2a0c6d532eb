"""Checks a simulated world's invariants: after each step and message, and when nothing runs."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NoReturn

from outrider.protocol.draft_messages import DraftBatch, Proposal, Skip
from outrider.protocol.messages import TokenRequest
from outrider_bench.simulator.worlds.requests import Answer
from verifier_svc.drafts.roster import PLACES
from verifier_svc.engine.loop import Engine
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.sequence import Assignment, Sequence
from verifier_svc.state.trie import Trie


class Violation(Exception):
    """An invariant does not hold."""


def broken(invariant: str, detail: object) -> NoReturn:
    """Raise Violation."""
    raise Violation(f"{invariant}: {detail}")


@dataclass(slots=True)
class Truth:
    """The facts that are known of a sequence outside the engine."""

    answer: Answer
    compares: bool
    """True if the text must equal the answer; a trusted drafter's sampled draft may change it."""
    length: int = 0
    """The committed length at the last check of the sequence."""


def compares(request: TokenRequest, *, sampled_drafts: bool) -> bool:
    """True if the text of a request does not depend on drafters at all."""
    sampling = request.sampling
    return sampling.greedy or sampling.seed is not None or not sampled_drafts


# --- after a step ---


def check_step(engine: Engine, truths: dict[int, Truth], max_sequences: int) -> int:
    """Check the engine between two steps; return how many checks were made.

    Raises Violation, or RuntimeError for a page that is lost or held twice.
    """
    sequences = engine.sequences
    scheduler = engine.scheduler
    engine.pool.check_integrity([sequence.kv for sequence in sequences.values()])
    waiting = [sequence.id for sequence in scheduler.waiting]
    unread = [*scheduler.unread]
    if sorted([*scheduler.running, *waiting, *unread]) != sorted(sequences):
        places = f"{[*scheduler.running]} run, {waiting} wait and {unread} are unread"
        broken("each sequence runs, waits or is unread", f"{places}, of {[*sequences]}")
    if len(scheduler.running) > max_sequences:
        broken("at most max_sequences run", [*scheduler.running])
    for sequence in scheduler.waiting:
        if sequence.kv.pages:
            broken("a waiting sequence holds no page", sequence.id)
    for sequence in sequences.values():
        _check_sequence(sequence, truths[sequence.id], engine.pool.page_size)
        for assignment in sequence.assignments.values():
            _check_trie(sequence, assignment)
    _check_roster(engine)
    return 4 + 5 * len(sequences)


def _check_sequence(sequence: Sequence, truth: Truth, page_size: int) -> None:
    tokens = sequence.tokens
    if len(tokens) < truth.length:
        broken("the committed length only grows", f"{truth.length}, then {len(tokens)}")
    truth.length = len(tokens)
    prompt = sequence.request.prompt
    if truth.compares:
        wanted = truth.answer.token_ids[: len(tokens) - len(prompt)]
        if tokens != [*prompt, *wanted]:
            broken("the text is the target's own", f"{tokens[len(prompt) :]}, not {wanted}")
    computed = sequence.kv.num_computed_tokens
    if computed > len(tokens) or computed > len(sequence.kv.pages) * page_size:
        broken("the cache holds committed tokens in pages", f"{computed} of {len(tokens)}")


def _check_trie(sequence: Sequence, assignment: Assignment) -> None:
    trie = assignment.trie
    count, depth = _size(trie)
    if count != trie.node_count:
        broken("a trie counts its guesses", f"{trie.node_count} for {count}")
    if count > trie.window.token_count or depth > trie.window.depth:
        broken("a trie keeps to its window", f"{count} in {depth}, not {trie.window}")
    window = assignment.window
    if window.depth > trie.window.depth or window.token_count > trie.window.token_count:
        broken("the drafter's window is in the trie's", f"{window} and {trie.window}")
    if assignment.sent_length > len(sequence.tokens):
        broken("no drafter is ahead of the commit", assignment.sent_length)


def _size(trie: Trie) -> tuple[int, int]:
    """Return the number of a trie's guesses, and the length of their longest path."""
    count = depth = 0
    level = [trie.root]
    while level := [child for node in level for child in node.children.values()]:
        count += len(level)
        depth += 1
    return count, depth


def _check_roster(engine: Engine) -> None:
    """Check that assignments and drafters agree on which drafters have which sequences."""
    connected = engine.drafting.roster.connected
    held: dict[str, set[int]] = {name: set() for name in connected}
    for sequence in engine.sequences.values():
        for name, assignment in sequence.assignments.items():
            if connected.get(name) is not assignment.drafter:
                broken("only connected drafters have sequences", name)
            held[name].add(sequence.id)
        # A new drafter may draft for the sequence together with a proven drafter of its family.
        if len(sequence.assignments) > PLACES:
            broken("a sequence has few drafters", sorted(sequence.assignments))
    for name, drafter in connected.items():
        if drafter.sequence_ids != held[name]:
            broken("a drafter's slots are its sequences", f"{drafter.sequence_ids}, {held[name]}")
        limit = drafter.hello.max_sequence_count
        if limit is not None and limit < len(drafter.sequence_ids):
            broken("no drafter has more sequences than it takes", f"{name}: {limit}")


def check_batch(token_counts: SequenceOf[int], max_batch_tokens: int) -> None:
    """Check that a forward has at most the limit of tokens, or else one token of each sequence."""
    if sum(token_counts) > max(max_batch_tokens, len(token_counts)):
        broken("a forward keeps to max_batch_tokens", f"{token_counts} for {max_batch_tokens}")


# --- a drafter's message ---


@dataclass(slots=True)
class Expected:
    """The counts that a message must add, and whether the message breaks the protocol."""

    token_count: int = 0
    stale_count: int = 0
    rejected: bool = False


def expected_counts(
    engine: Engine, drafter: Drafter, batch: DraftBatch, opened: dict[int, int]
) -> Expected:
    """Compute without a trie how the verifier must judge a message.

    `opened` has the length that each sequence had when it was announced. A sequence that is not in
    `opened` has not been announced yet.
    """
    expected = Expected()
    entries: list[Proposal | Skip] = [*batch.proposals, *batch.skips]
    proposal_count = max(len(batch.proposals), 1 - len(entries))
    if proposal_count > drafter.proposals_left or len(batch.skips) > drafter.skips_left:
        expected.rejected = True
        return expected
    for entry in entries:
        if entry.sequence_id > drafter.last_sequence_id:
            expected.rejected = True
            return expected
        count = len(entry.token_ids) if isinstance(entry, Proposal) else 0
        expected.token_count += count
        sequence = engine.sequences.get(entry.sequence_id)
        if sequence is None or not _is_opened(sequence, drafter):
            expected.stale_count += count
            continue
        first = opened.get(entry.sequence_id, len(sequence.tokens))
        if not first <= entry.base_length <= len(sequence.tokens):
            expected.rejected = True
            return expected
        if isinstance(entry, Proposal):
            expected.stale_count += contradicted(entry, sequence.tokens)
    return expected


def _is_opened(sequence: Sequence, drafter: Drafter) -> bool:
    """Return whether the drafter has the sequence and was told of it."""
    assignment = sequence.assignments.get(drafter.id)
    return assignment is not None and assignment.opened


def contradicted(proposal: Proposal, committed: list[int]) -> int:
    """Count the tokens of a proposal whose path contradicts the committed text."""
    since = tuple(committed[proposal.base_length :])
    paths: list[tuple[int, ...]] = [()]
    count = 0
    parents = proposal.parents or range(len(proposal.token_ids))
    for token, parent in zip(proposal.token_ids, parents, strict=True):
        path = (*paths[parent], token)
        paths.append(path)
        seen = path[: len(since)]
        count += seen != since[: len(seen)]
    return count


# --- when all is quiet ---


def check_quiet(engine: Engine) -> None:
    """Check that no request left anything behind; raises as `check_step` does."""
    scheduler = engine.scheduler
    if engine.sequences or scheduler.running or len(scheduler.waiting):
        broken("no sequence is left", [*engine.sequences])
    if engine.pool.used_count:
        broken("no page is left in use", engine.pool.used_count)
    engine.pool.check_integrity()
    for drafter in engine.drafting.roster.connected.values():
        if drafter.sequence_ids:
            broken("no drafter's slot is left", f"{drafter.id}: {drafter.sequence_ids}")
        if drafter.outbox:
            broken("every message to a drafter is sent", drafter.id)
    if engine.outbox.holds_chunks or engine.drafting.rejections:
        broken("every message of the engine is sent", engine.drafting.rejections)
