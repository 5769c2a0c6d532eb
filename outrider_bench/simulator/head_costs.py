"""Measures what drafts of a head cost: rounds as its drafter runs them, with random features."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from drafter_svc.families.head_worker import HeadDraft
from outrider_bench.head_rig import HeadRig, head_rig
from outrider_bench.simulator.costs import DraftingCost

_CONTEXT = 128
_PROMPTS = (32, 256)
# Tokens that a verdict commits, and the lengths of drafts whose times differ by the further levels.
_COMMITTED = 2
_COUNTS = (1, 5)
_ROUNDS = 4
_REPEATS = 20


def head_cost(head: Path, target: Path, threads: int, sequences: Sequence[int]) -> DraftingCost:
    """The drafting cost of a head, measured for these numbers of sequences.

    `round_s` and `sequence_s` are those of a round of one guess, `token_s` and `tree_token_s` the
    time of each further one. A verdict's features are part of a round.
    """
    with head_rig(str(head), str(target), threads) as rig:
        points = [(n, count, False) for n in sequences for count in _COUNTS]
        points += [(n, _COUNTS[1], True) for n in sequences]
        best = dict.fromkeys(points, float("inf"))
        # All points are measured in each round, so that other work on the machine spoils none.
        for _ in range(_ROUNDS):
            for n, count, trees in points:
                seconds = _round_s(rig, n, count, trees=trees)
                best[n, count, trees] = min(best[n, count, trees], seconds)
        short, long = (min(_prompt_s(rig, n) for _ in range(_ROUNDS)) for n in _PROMPTS)
    first = {n: best[n, _COUNTS[0], False] for n in sequences}
    least, most = min(sequences), max(sequences)
    each = max(0.0, first[most] - first[least]) / max(most - least, 1)

    def further(n: int, *, trees: bool) -> float:
        return max(0.0, best[n, _COUNTS[1], trees] - first[n]) / (_COUNTS[1] - _COUNTS[0])

    return DraftingCost(
        round_s=max(0.0, first[least] - least * each),
        sequence_s=each,
        token_s={n: further(n, trees=False) for n in sequences},
        tree_token_s={n: further(n, trees=True) for n in sequences},
        prompt_token_s=max(0.0, long - short) / (_PROMPTS[1] - _PROMPTS[0]),
    )


def _round_s(rig: HeadRig, sequences: int, count: int, *, trees: bool) -> float:
    """Seconds of a round: features of the last commit, and `count` guesses of each sequence."""
    drafts = [_begun(rig, _CONTEXT) for _ in range(sequences)]
    rig.draft(drafts, count, trees=trees)
    times = []
    for _ in range(_REPEATS):
        for draft in drafts:
            rig.commit(draft, _tokens(_COMMITTED), _features(draft, _COMMITTED))
        started = time.perf_counter()
        rig.draft(drafts, count, trees=trees)
        times.append(time.perf_counter() - started)
    _end(rig, drafts)
    return min(times)


def _prompt_s(rig: HeadRig, length: int) -> float:
    """Seconds of a round that reads the features of a prompt first."""
    draft = _begun(rig, length)
    started = time.perf_counter()
    rig.draft([draft], 1, trees=False)
    seconds = time.perf_counter() - started
    _end(rig, [draft])
    return seconds


def _begun(rig: HeadRig, length: int) -> HeadDraft:
    draft = rig.begin(_tokens(length))
    draft.keep(0, _features(draft, length - 1))
    return draft


def _tokens(count: int) -> list[int]:
    # Random ones, so that no two sequences share pages.
    return torch.randint(100, (count,)).tolist()


def _features(draft: HeadDraft, count: int) -> torch.Tensor:
    return torch.randn(count, draft.width).to(draft.dtype)


def _end(rig: HeadRig, drafts: Sequence[HeadDraft]) -> None:
    for draft in drafts:
        rig.worker.close(draft)
