"""Drafting with a smaller model of the same tokenizer, for all sequences at once.

Here is what runs on the event loop: caches that follow the verdicts, and which guesses and branches the model is to make. Torch is
imported only when a model is loaded, since the settings are read, and memory is placed, before that.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from pydantic import Field

from drafter_svc.branching import fan_out
from drafter_svc.families.base import Family, FamilySettings, Loaded
from drafter_svc.families.cached_draft import CachedDraft
from drafter_svc.metrics import Metrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.draft_sequence import DraftSequence
from outrider.messages import DraftDistribution
from outrider.model_info import ModelInfo
from outrider.process import telemetry
from outrider.process.config import Device, Dtype
from outrider.process.extras import need_models
from outrider.tokenizer import fingerprint, load_tokenizer

if TYPE_CHECKING:
    from drafter_svc.families.draft_model import DraftModel
    from outrider.lm.runner import ModelRunner

# On a GPU, drafts of up to so many sequences and branches at once are CUDA graphs.
_GRAPHED_SEQUENCES = 64
# Of the memory that is free on a GPU. The target, which may be loading there as well, needs the most of it.
_CACHE_SHARE = 0.1


class ModelSettings(FamilySettings):
    """Settings of the family model."""

    model: str = Field(min_length=1)
    """Directory or hub id of the draft model."""

    dtype: Dtype = "auto"
    """Type of the weights; auto is the checkpoint's."""

    device: Device = "auto"
    """auto (CUDA when there is any), cpu, cuda or cuda:N."""

    page_count: int | None = Field(None, ge=1)
    """Pages of the KV cache; unset sizes it by the memory there is."""

    max_batch_tokens: int = Field(512, ge=1)
    """Tokens in one forward."""

    mask_drafts: bool = True
    """Keep drafts within the request's grammar, so that none is wasted on what is forbidden."""

    max_entries: int = Field(32, ge=1, le=256)
    """Tokens of a sampled guess's distribution that are kept and sent."""

    branches: int = Field(4, ge=0, le=64)
    """Branches beside a draft that are prepared while it is verified, where the verifier lets drafters run ahead."""

    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""


class ModelFamily(Family):
    """One verifier's part in the draft model: its sequences, and the guesses and branches that are made for them."""

    name = "model"
    settings = ModelSettings
    distributions = frozenset(DraftDistribution)

    def __init__(self, model: DraftModel, vocab_size: int, *, branch_count: int = 4) -> None:
        """Ids from `vocab_size` on, the target's, are never proposed.

        `branch_count` is how many branches are prepared while a draft is verified.
        """
        self.fatal = model.fatal
        self.device = str(model.runner.device)
        self._model = model
        self._pool = model.pool
        self._vocab_size = vocab_size
        self._branch_count = branch_count
        self._drafts: dict[int, CachedDraft] = {}
        self._round: Future[None] | None = None
        self._is_closed = False

    @classmethod
    async def load(cls, settings: ModelSettings, place: PlacementPlan, metrics: Metrics) -> Loaded:
        need_models()
        from drafter_svc.families.draft_model import DraftModel
        from outrider.grammar.compiler import GrammarCompiler

        # Loaded on the thread that will compute; see verifier_svc.engine.engine_thread for why.
        thread = ThreadPoolExecutor(1, thread_name_prefix="draft-model")
        runner = await asyncio.get_running_loop().run_in_executor(
            thread, _load_runner, settings, place
        )
        ends = runner.eos_token_ids
        grammars = (
            GrammarCompiler(settings.model, runner.vocab_size, ends)
            if settings.mask_drafts
            else None
        )
        model = DraftModel(
            runner,
            thread,
            max_batch_tokens=settings.max_batch_tokens,
            max_entries=settings.max_entries,
            grammars=grammars,
        )

        def make(info: ModelInfo) -> ModelFamily:
            return cls(model, info.vocab_size, branch_count=settings.branches)

        return Loaded(make, fingerprint(load_tokenizer(settings.model)))

    def opened(self, sequence: DraftSequence) -> None:
        opened = sequence.opened
        seed = opened.sampling.seed if opened.sampling.seed is not None else secrets.randbits(64)
        foreign, length = self._is_foreign(sequence.tokens), len(sequence.tokens)
        draft = CachedDraft(sequence, seed, self._vocab_size, foreign, committed_count=length)
        self._pool.match_prefix(draft.kv, sequence.tokens, opened.tenant)
        self._drafts[sequence.id] = draft

    def _is_foreign(self, token_ids: Sequence[int]) -> bool:
        return max(token_ids) >= self._model.runner.vocab_size

    def committed(self, sequence: DraftSequence, standing: int) -> None:
        draft = self._drafts[sequence.id]
        new = sequence.tokens[draft.committed_count :]
        matched = standing - draft.committed_count
        draft.committed_count = len(sequence.tokens)
        draft.foreign |= self._is_foreign(new)
        if matched >= len(new):
            branch = None
            del draft.others[: len(new)]
        else:
            branch = draft.branches.get((matched, new[matched])) if sequence.guesses else None
            # Nothing is remembered besides the guesses of a branch.
            draft.others = [[] for _ in sequence.guesses]
        if branch is not None:
            # The branch that came true has a cache of its own, which goes on where the chain's would have to be rewound.
            draft.kv, branch.kv = branch.kv, draft.kv
        elif standing < draft.kv.num_computed_tokens:
            length = len(sequence.tokens)
            with telemetry.start(
                "rewind",
                sequence.traceparent,
                outrider__base_length=length,
                outrider__kept_tokens=standing,
            ):
                self._pool.truncate(draft.kv, standing)
        self._drop_branches(draft)

    def closed(self, sequence: DraftSequence) -> None:
        if draft := self._drafts.pop(sequence.id, None):
            self._drop_branches(draft)
            self._pool.free(draft.kv)

    def _drop_branches(self, draft: CachedDraft) -> None:
        for branch in draft.branches.values():
            self._pool.free(branch.kv)
        draft.branches.clear()

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """The chains grow; and while the verifier is at work, so do branches, in the same forwards."""
        running_ahead = not any(sequence.urgent for sequence in sequences)
        drafts = [
            draft
            for draft in (self._drafts[sequence.id] for sequence in sequences)
            if not draft.foreign
        ]
        growing = [
            draft
            for draft in drafts
            if draft.sequence.goal > 0 and draft.length < self._model.runner.context_length
        ]
        branching = [draft for draft in drafts if running_ahead and self._begin_branches(draft)]
        branches = [branch for draft in branching for branch in draft.branches.values()]
        if growing or branches:
            await self._grow([*growing, *branches], interrupted, urgent=not running_ahead)
        for draft in growing:
            if draft.stuck:
                draft.sequence.give_up()
            elif not draft.begun and self._model.fits(draft):
                draft.sequence.postpone()
        for draft in branching:
            self._offer_branches(draft)

    async def _grow(
        self, drafts: list[CachedDraft], interrupted: Callable[[], bool], *, urgent: bool
    ) -> None:
        """Raises what a forward raised."""

        def ended() -> bool:
            return self._is_closed or interrupted()

        self._round = self._model.grow(drafts, urgent=urgent, interrupted=ended)
        await asyncio.wrap_future(self._round)

    async def aclose(self) -> None:
        """Give back all pages, as soon as no forward writes to them."""
        self._is_closed = True
        if self._round is not None:
            await asyncio.gather(asyncio.wrap_future(self._round), return_exceptions=True)
        for draft in self._drafts.values():
            self._drop_branches(draft)
            self._pool.free(draft.kv)
        self._drafts.clear()

    def _begin_branches(self, draft: CachedDraft) -> bool:
        """Branches for what may be committed beside the chain: the likeliest other tokens at each place, by `fan_out`.

        They are guessed once for each verdict, and only while there is plenty of cache. What comes behind a draft that stands as a
        whole is for the chain, which grows in the same forwards. False if this is not the time for it.
        """
        sequence, pool = draft.sequence, self._pool
        if sequence.branch_room == 0 or pool.free_count < pool.page_count // 2:
            return False
        # Those of a round that failed.
        self._drop_branches(draft)
        places = min(sequence.draft_tokens, len(sequence.guesses) - 1)
        budget = min(
            self._branch_count,
            (sequence.branch_room - sequence.room) // (1 + sequence.draft_tokens),
        )
        for at, count in enumerate(fan_out(sequence.acceptance, places, max(budget, 0))):
            if sequence.window.depth - at <= sequence.draft_tokens:
                break
            taken = sequence.guessed_at(at)
            for token in [token for token in draft.others[at] if token not in taken][:count]:
                kv = pool.fork(draft.kv, len(sequence.tokens) + at)
                seed, grammar = draft.seed, draft.grammar
                branch = CachedDraft(
                    sequence, seed, self._vocab_size, at=at, run=[token], kv=kv, grammar=grammar
                )
                draft.branches[at, token] = branch
        return True

    def _offer_branches(self, draft: CachedDraft) -> None:
        """Without a guess behind it a branch is of no use, and the window may have filled since it was begun."""
        for (at, _), branch in draft.branches.items():
            if 1 < len(branch.run) <= draft.sequence.branch_room:
                draft.sequence.branch(at, branch.run)
        draft.sequence.give_up_branches()


def _load_runner(settings: ModelSettings, place: PlacementPlan) -> ModelRunner:
    from outrider.lm.runner import Bounds, ModelRunner

    runner = ModelRunner.load(
        settings.model,
        dtype=settings.dtype,
        device="cpu" if place.kind != "local" else settings.device,
        page_count=settings.page_count,
        cache_share=_CACHE_SHARE,
        threads=place.threads,
        trust_remote_code=settings.trust_remote_code,
    )
    # What a sequence lacks is the token that the verifier drew, and at most its own last guess besides.
    runner.capture(Bounds(_GRAPHED_SEQUENCES, 2, settings.max_batch_tokens))
    return runner
