"""A head as its drafter runs it, told of tokens and features by hand instead of by a verifier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from drafter_svc.families.head_worker import HeadDraft, HeadWorker, Offer
from outrider.drafter.draft_sequence import DraftSequence
from outrider.protocol.draft_messages import Opened, Verdict, Window
from outrider.protocol.messages import DraftDistribution, SamplingParams

DEPTH = 8
"""Guesses of a draft: the most that a verifier asks for by default."""


class HeadRig:
    """A loaded head, and its greedy sequences."""

    def __init__(self, worker: HeadWorker) -> None:
        self.worker = worker
        self._count = 0

    def begin(self, prompt: Sequence[int]) -> HeadDraft:
        """A new sequence, of which the head has read nothing."""
        self._count += 1
        window = Window(token_count=1000, depth=DEPTH)
        one_hot = DraftDistribution.ONE_HOT
        opened = Opened(
            self._count,
            list(prompt),
            SamplingParams(0.0),
            one_hot,
            window,
            DEPTH,
            prompt_length=len(prompt),
        )
        return self.worker.begin(DraftSequence(opened), 0, projected=False)

    def commit(self, draft: HeadDraft, tokens: Sequence[int], rows: torch.Tensor) -> None:
        """Commit tokens; `rows` [len(tokens), width] are the features of those before each."""
        sequence = draft.sequence
        draft.keep(len(sequence.tokens) - 1, rows)
        length = len(sequence.tokens) + len(tokens)
        sequence.advance_or_rewind(Verdict(sequence.id, length, list(tokens), 0, DEPTH))

    def draft(
        self, drafts: Sequence[HeadDraft], count: int, *, trees: bool
    ) -> Sequence[Offer | None]:
        """Guess `count` tokens of each; None where features are missing."""
        return self.worker.draft(drafts, [count] * len(drafts), trees=trees).result()


@contextmanager
def head_rig(head: str, target: str, threads: int = 1) -> Iterator[HeadRig]:
    """Load a head for a target, as `--drafter head=PATH` does, on a thread until the block's end.

    Raises OutriderError(INVALID_VALUE) for a head that does not fit the target.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="head") as thread:
        loading = thread.submit(
            lambda: HeadWorker.load(
                thread,
                head=head,
                target=target,
                layers=(),
                dtype="auto",
                device="cpu",
                page_count=None,
                threads=threads,
            )
        )
        yield HeadRig(loading.result())
