"""Makes random trees of draft tokens, and lets an engine verify them in place of its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tests.tree_paths import path_to
from verifier_svc.engine.loop import Engine
from verifier_svc.state.scheduled_sequence import ScheduledSequence
from verifier_svc.state.sequence import Sequence as Request
from verifier_svc.state.trie import DraftTree
from verifier_svc.verification.grammar_masks import GrammarMasks

# `_DEEP` is the share of tokens that follow the token drawn last. `_MAIN` and `_SIBLING` are the
# probabilities that the likely token, if it is not in the tree yet, becomes a first child or a
# further child.
_DEEP = 0.6
_MAIN = 0.4
_SIBLING = 0.9


def random_tree(
    rng: np.random.Generator,
    count: int,
    vocab: int,
    likely: Sequence[int] = (),
    main_path: Sequence[int] = (),
) -> DraftTree:
    """Return a tree of at most `count` tokens besides the main path, depth-first.

    The tree often has a part of the continuation `likely`, as first children or as a branch.
    """
    token_ids = list(main_path)
    parents = list(range(len(main_path)))
    path = list(range(len(main_path) + 1))
    for _ in range(count):
        if rng.random() > _DEEP:
            del path[int(rng.integers(1, len(path) + 1)) :]
        parent = path[-1]
        taken = {token for token, above in zip(token_ids, parents, strict=True) if above == parent}
        free = [token for token in range(vocab) if token not in taken]
        if not free:
            continue
        token = free[int(rng.integers(len(free)))]
        depth = len(path) - 1
        text = [token_ids[row - 1] for row in path_to(parent, parents)]
        on_way = depth < len(likely) and text == list(likely[:depth])
        share = _SIBLING if taken else _MAIN
        if on_way and likely[depth] not in taken and rng.random() < share:
            token = likely[depth]
        token_ids.append(token)
        parents.append(parent)
        path.append(len(token_ids))
    is_chain = parents == list(range(len(parents)))
    return DraftTree(token_ids, [], [] if is_chain else parents)


def shuffled(tree: DraftTree, rng: np.random.Generator) -> tuple[DraftTree, list[int]]:
    """Return the tree with its children in another order, and the old row of each new row."""
    parents = tree.parents or list(range(len(tree.token_ids)))
    order: list[int] = []
    token_ids: list[int] = []
    new_parents: list[int] = []
    pending = [(0, 0)]
    while pending:
        row, parent = pending.pop()
        if row:
            token_ids.append(tree.token_ids[row - 1])
            new_parents.append(parent)
        order.append(row)
        below = [child for child, above in enumerate(parents, 1) if above == row]
        at = len(token_ids)
        pending += [(below[i], at) for i in rng.permutation(len(below))]
    return DraftTree(token_ids, [], new_parents), order


class TreeGrafter(GrammarMasks):
    """Puts a random tree around each chain that the scheduler chose.

    `likely` returns how a request's text continues. Sampled drafts stay unchanged.
    """

    def __init__(
        self,
        engine: Engine,
        seed: int,
        vocab: int,
        likely: Callable[[Request], Sequence[int]] = lambda request: (),
        most: int = 8,
    ) -> None:
        super().__init__()
        self._pool = engine.pool
        self._rng = np.random.default_rng(seed)
        self._vocab = vocab
        self._likely = likely
        self._most = most
        self.tree_count = 0
        engine._grammar_masks = self

    def cut(self, batch: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        return super().cut([self._grafted(scheduled) for scheduled in batch])

    def _grafted(self, scheduled: ScheduledSequence) -> ScheduledSequence:
        draft = scheduled.draft
        if not scheduled.samples or draft.distributions:
            return scheduled
        count = int(self._rng.integers(0, self._most + 1))
        likely = self._likely(scheduled.sequence)
        tree = random_tree(self._rng, count, self._vocab, likely, draft.token_ids)
        end = scheduled.start + len(scheduled.token_ids) + len(tree.token_ids)
        if not self._pool.reserve(scheduled.sequence.kv, end):
            return scheduled
        self.tree_count += bool(tree.parents)
        return replace(scheduled, draft=tree)
