"""Drafts with a head: a small network that reads the target's hidden states.

This file runs on the event loop. The code here collects the verifier's messages about each
sequence, and offers the head's guesses. head_worker.py runs the head on a thread of its own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from drafter_svc.branching import Branch, offer_likeliest
from drafter_svc.families.base import Family, Loaded
from drafter_svc.families.settings import INT8, HeadSettings
from drafter_svc.families.weights_version import load_versioned
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError, Reason
from outrider.process.settings.config import need_models
from outrider.protocol.draft_messages import FeatureRows, Welcome
from outrider.protocol.messages import DraftDistribution
from outrider.protocol.model_info import ModelInfo
from outrider.tokenizer import fingerprint, load_tokenizer

if TYPE_CHECKING:
    from drafter_svc.families.head_worker import HeadDraft, HeadWorker, Offer


log = logging.getLogger(__name__)


class HeadFamily(Family):
    """Drafts for the sequences of one connection with the process's shared head.

    All methods run on the event loop. The worker does their work on its thread, call after call.
    """

    name = "head"
    settings = HeadSettings
    has_weights = True
    distributions = frozenset([DraftDistribution.ONE_HOT, DraftDistribution.COUPLED])

    def __init__(self, worker: HeadWorker, vocab_size: int) -> None:
        """`vocab_size` is the size of the target's vocabulary."""
        from outrider.lm.devices import gpu_uuid

        self.fatal = worker.fatal
        self.device = str(worker.device)
        self.gpu_uuid = gpu_uuid(worker.device)
        self.feature_request = worker.feature_request
        self.worker = worker
        """All connections share it."""
        self._projected = False
        self._vocab_size = vocab_size
        self._drafts: dict[int, HeadDraft] = {}

    @classmethod
    async def load(
        cls, settings: HeadSettings, place: PlacementPlan, metrics: DrafterMetrics
    ) -> Loaded:
        """Load the head on a new thread, which runs all its forwards later."""
        need_models()
        from drafter_svc.families.head_worker import HeadWorker

        thread = ThreadPoolExecutor(1, thread_name_prefix="head")
        device = "cpu" if place.kind != "local" else settings.device
        load = partial(
            HeadWorker.load,
            thread,
            head=settings.head,
            target=settings.target,
            layers=tuple(settings.head_states),
            dtype=settings.dtype,
            int8=INT8[settings.weights],
            device=device,
            page_count=settings.page_count,
            threads=place.threads,
            reading=settings.head_reading,
            trust_remote_code=settings.trust_remote_code,
        )
        worker, version = await asyncio.get_running_loop().run_in_executor(
            thread, load_versioned, "head", settings.head, load
        )
        spoken = await asyncio.to_thread(lambda: fingerprint(load_tokenizer(settings.target)))

        def make(info: ModelInfo) -> HeadFamily:
            family = cls(worker, info.vocab_size)
            family.weights_version = version
            return family

        return Loaded(make, spoken)

    def welcomed(self, welcome: Welcome) -> None:
        """Refuse a verifier that sends no features, or features of another width."""
        self._projected = welcome.projects_features
        wanted = self.worker.width(projected=self._projected)
        if welcome.feature_width == 0:
            message = "the verifier does not send the hidden states that the head reads"
            raise OutriderError(Reason.INVALID_VALUE, message)
        if welcome.feature_width != wanted:
            message = (
                f"the head reads features of {wanted} numbers, and the verifier's have"
                f" {welcome.feature_width}: the head was made for another target"
            )
            raise OutriderError(Reason.INVALID_VALUE, message)
        made = "projected by the verifier" if self._projected else "as the target has them"
        log.info("features of %d numbers a token, %s", wanted, made)

    def opened(self, sequence: DraftSequence) -> None:
        """Open a sequence; the head starts on it when its features come."""
        seed = sequence.opened.sampling.seed
        seed = secrets.randbits(64) if seed is None else seed
        draft = self.worker.begin(sequence, seed, projected=self._projected)
        self._drafts[sequence.id] = draft

    def features(self, sequence: DraftSequence, first_position: int, rows: FeatureRows) -> None:
        """Keep features for the next draft, or, within a prompt, have the head read them."""
        draft = self._drafts[sequence.id]
        end = draft.keep(first_position, rows)
        if end < len(sequence.tokens) - 1:
            self.worker.read(draft, draft.take_news())

    def closed(self, sequence: DraftSequence) -> None:
        """Free a sequence's pages."""
        if draft := self._drafts.pop(sequence.id, None):
            self.worker.close(draft)

    async def aclose(self) -> None:
        """Free all pages."""
        for draft in self._drafts.values():
            self.worker.close(draft)
        self._drafts.clear()

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Guess the tokens that the verifier's next step lacks.

        For later steps a head would read its own states in place of the target's, so it guesses
        nothing for them.
        """
        asked = [sequence for sequence in sequences if sequence.urgent]
        if not asked:
            return
        drafts = [self._drafts[sequence.id] for sequence in asked]
        wanted = [len(sequence.guesses) + sequence.num_wanted for sequence in asked]
        trees = any(sequence.wants_tree for sequence in asked)
        offers = await self._drafted(drafts, wanted, trees=trees)
        for sequence, offer in zip(asked, offers, strict=True):
            if offer is not None:
                self._offer(sequence, offer)

    async def _drafted(
        self, drafts: Sequence[HeadDraft], wanted: Sequence[int], *, trees: bool
    ) -> list[Offer | None]:
        """Draft on the head's thread, and wait for the offers."""
        return await asyncio.wrap_future(self.worker.draft(drafts, wanted, trees=trees))

    def _offer(self, sequence: DraftSequence, offer: Offer) -> None:
        """Extend the chain, and offer the likeliest tokens beside it where trees are verified."""
        held = len(sequence.guesses)
        if offer.tokens[:held] != sequence.guesses:
            # Some guesses outlived the commit, and the verifier prefers them to later guesses.
            return
        known = [token for token in offer.tokens if token < self._vocab_size]
        if len(known) < len(offer.tokens):
            return
        sequence.extend(offer.tokens[held:], confidences=offer.confidences[held:])
        if sequence.tree_room > 0:
            beside = [
                Branch(at, [token], [share])
                for at in range(held, len(sequence.guesses))
                for token, share in offer.alternatives[at]
            ]
            beside += [
                Branch(deep.at, deep.run, deep.shares, shared=len(deep.run) - 1)
                for deep in offer.deeper
                if held <= deep.at and deep.at + len(deep.run) <= len(sequence.guesses)
            ]
            offer_likeliest(sequence, beside)
