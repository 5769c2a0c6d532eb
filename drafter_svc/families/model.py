"""Drafts with a smaller model.

This file runs on the event loop. The code here keeps the KV caches in step with the verdicts and
decides which guesses and branches the model makes; draft_model.py makes them on a thread of its
own. Torch is imported only when a model is loaded, because the process must be pinned to its cores
first.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from drafter_svc.branching import Branch, fan_out, offer_likeliest
from drafter_svc.families.base import Family, Loaded
from drafter_svc.families.cached_draft import CachedDraft
from drafter_svc.families.settings import INT8, ModelSettings
from drafter_svc.families.weights_version import load_versioned
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.draft_sequence import DraftSequence
from outrider.process.observability import telemetry
from outrider.process.settings.config import need_models
from outrider.protocol.messages import DraftDistribution
from outrider.protocol.model_info import ModelInfo
from outrider.tokenizer import fingerprint, load_tokenizer

if TYPE_CHECKING:
    from drafter_svc.families.draft_model import DraftModel
    from outrider.lm.runner import ModelRunner

# On a GPU, forwards of up to this many sequences and branches are captured as CUDA graphs.
_GRAPHED_SEQUENCES = 64
# The maximum number of tokens in one forward. A draft model reads prompts in chunks, in the room
# that its drafts leave.
_MAX_BATCH_TOKENS = 512
# The number of branches that are prepared beside a draft while it is verified, where the verifier
# lets drafters run ahead. Each branch takes a row of every forward, so only the likeliest few are
# worth it.
_BRANCHES = 4


class ModelFamily(Family):
    """Drafts for the sequences of one connection with the process's shared draft model.

    All methods run on the event loop. `propose` waits for the model's thread. Between the
    rounds of `propose` the other methods cut and free KV caches.
    """

    name = "model"
    settings = ModelSettings
    has_weights = True
    distributions = frozenset(DraftDistribution)

    def __init__(
        self, model: DraftModel, vocab_size: int, *, branch_count: int = _BRANCHES
    ) -> None:
        """`vocab_size` is the size of the target's vocabulary; no id outside it is proposed.

        At most `branch_count` branches are prepared while a draft is verified.
        """
        from outrider.lm.devices import gpu_uuid

        self.fatal = model.fatal
        self.device = str(model.runner.device)
        self.gpu_uuid = gpu_uuid(model.runner.device)
        self._model = model
        self._pool = model.pool
        self._vocab_size = vocab_size
        self._branch_count = branch_count
        self._drafts: dict[int, CachedDraft] = {}
        self._round: Future[None] | None = None
        self._is_closed = False

    @classmethod
    async def load(
        cls, settings: ModelSettings, place: PlacementPlan, metrics: DrafterMetrics
    ) -> Loaded:
        """Load the model on a new thread, which runs all its forwards later."""
        need_models()
        # Load the model on the thread that will compute. OpenMP keeps a team of workers for each
        # thread that ever computed, and two teams on the same cores slow a small model down.
        thread = ThreadPoolExecutor(1, thread_name_prefix="draft-model")
        model, spoken, version = await asyncio.get_running_loop().run_in_executor(
            thread, _load_model, settings, place, thread
        )

        def make(info: ModelInfo) -> ModelFamily:
            family = cls(model, info.vocab_size)
            family.weights_version = version
            return family

        return Loaded(make, spoken, model.runner.page_count)

    def opened(self, sequence: DraftSequence) -> None:
        """Create a sequence's KV cache, and share the pages of a known prefix.

        If the draft model has another vocabulary, the first round shares the pages.
        """
        opened = sequence.opened
        seed = opened.sampling.seed if opened.sampling.seed is not None else secrets.randbits(64)
        draft = CachedDraft(sequence, seed, self._vocab_size)
        draft.committed_count = len(sequence.tokens)
        draft.has_unknown_ids = self._has_unknown_ids(sequence.tokens)
        if self._model.vocabulary is None:
            self._pool.match_prefix(draft.kv, sequence.tokens, opened.tenant)
        self._drafts[sequence.id] = draft

    def _has_unknown_ids(self, token_ids: Sequence[int]) -> bool:
        own = self._model.vocabulary or self._model.runner
        return max(token_ids) >= own.vocab_size

    def committed(self, sequence: DraftSequence, num_valid_tokens: int) -> None:
        """Cut the KV cache to the tokens that are still right, or go on with a branch's cache."""
        draft = self._drafts[sequence.id]
        new = sequence.tokens[draft.committed_count :]
        before = draft.committed_count
        # The number of tokens after the earlier commit that are still right: a part of `new` if the
        # chain was wrong, else all of `new` and the guesses after it.
        kept = num_valid_tokens - before
        held = [*new, *sequence.guesses][:kept]
        draft.committed_count = len(sequence.tokens)
        draft.has_unknown_ids |= self._has_unknown_ids(new)
        branch = None
        if kept >= len(new):
            del draft.alternatives[: len(new)]
        else:
            if sequence.guesses:
                branch = draft.branches.get((kept, new[kept]))
            # No alternatives were remembered for the guesses of a branch.
            draft.alternatives = [[] for _ in sequence.guesses]
        if branch is not None:
            # The branch's first token was committed. The branch's cache continues from the place to
            # which the chain's cache would be rewound.
            draft.kv, branch.kv = branch.kv, draft.kv
            held += branch.run
        if not draft.has_unknown_ids:
            # If the text has no more tokens in the draft model's vocabulary than before, read its
            # last token again.
            valid = max(0, min(draft.follow(before, held), draft.length - 1))
            if valid < draft.kv.num_computed_tokens:
                self._rewind(draft, valid)
        self._drop_branches(draft)

    def _rewind(self, draft: CachedDraft, length: int) -> None:
        """Cut a sequence's KV cache to its first `length` tokens."""
        with telemetry.start(
            "rewind",
            draft.sequence.traceparent,
            outrider__base_length=len(draft.sequence.tokens),
            outrider__kept_tokens=length,
        ):
            self._pool.truncate(draft.kv, length)

    def closed(self, sequence: DraftSequence) -> None:
        """Free a sequence's pages."""
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
        """Grow the chains; while the verifier works, grow branches in the same forwards."""
        running_ahead = not any(sequence.urgent for sequence in sequences)
        drafts = [self._drafts[sequence.id] for sequence in sequences]
        drafts = [draft for draft in drafts if not draft.has_unknown_ids]
        context_length = self._model.runner.context_length
        growing = [
            draft
            for draft in drafts
            if draft.sequence.num_wanted > 0 and draft.length < context_length
        ]
        branching = [draft for draft in drafts if running_ahead and self._begin_branches(draft)]
        branches = [branch for draft in branching for branch in draft.branches.values()]
        if growing or branches:
            await self._grow([*growing, *branches], interrupted, urgent=not running_ahead)
        for draft in growing:
            self._offer_leaves(draft)
            if draft.stuck:
                draft.sequence.give_up()
            # The round ended, or was interrupted, before the whole prompt was read.
            elif not draft.begun and self._model.fits(draft):
                draft.sequence.postpone()
        for draft in branching:
            self._offer_branches(draft)

    async def _grow(
        self, drafts: list[CachedDraft], interrupted: Callable[[], bool], *, urgent: bool
    ) -> None:
        """Run a round of the draft model. Raises the exception of a forward that failed."""

        def ended() -> bool:
            return self._is_closed or interrupted()

        self._round = self._model.grow(drafts, urgent=urgent, interrupted=ended)
        await asyncio.wrap_future(self._round)

    async def aclose(self) -> None:
        """Free all pages, after the last forward that writes to them."""
        self._is_closed = True
        if self._round is not None:
            await asyncio.gather(asyncio.wrap_future(self._round), return_exceptions=True)
        for draft in self._drafts.values():
            self._drop_branches(draft)
            self._pool.free(draft.kv)
        self._drafts.clear()

    def _begin_branches(self, draft: CachedDraft) -> bool:
        """Start branches with the likeliest alternative tokens, spread over places by `fan_out`.

        Branches are made once for each verdict, and only while half of the KV cache is free. No
        branch is made after the last guess: the chain itself grows there, in the same forwards.
        Returns False if no branch may be made now.
        """
        sequence = draft.sequence
        if sequence.branch_room == 0 or self._pool.free_count < self._pool.page_count // 2:
            return False
        # Free the branches of a round that failed.
        self._drop_branches(draft)
        places = min(sequence.draft_tokens, len(sequence.guesses) - 1)
        space = (sequence.branch_room - sequence.remaining_window) // (1 + sequence.draft_tokens)
        budget = max(0, min(self._branch_count, space))
        for at, count in enumerate(fan_out(sequence.acceptance, places, budget)):
            if sequence.window.depth - at <= sequence.draft_tokens:
                break
            unknown = [
                (token, share)
                for token, share in draft.alternatives[at]
                if not sequence.has_guess_after(at, token)
            ]
            for token, share in unknown[:count]:
                draft.branches[at, token] = self._fork(draft, at, token, share)
        return True

    def _fork(self, draft: CachedDraft, at: int, token: int, share: float) -> CachedDraft:
        """Return a branch that follows the first `at` guesses and begins with `token`."""
        sequence = draft.sequence
        branch = CachedDraft(sequence, draft.seed, self._vocab_size, at=at)
        branch.run, branch.run_shares = [token], [share]
        branch.grammar = draft.grammar
        branch.own_text = draft.own_text
        branch.kv = self._pool.fork(draft.kv, len(draft.committed) + at)
        return branch

    def _offer_branches(self, draft: CachedDraft) -> None:
        """Offer the branches that have guesses after their first token and fit the window."""
        sequence = draft.sequence
        for (at, _), branch in draft.branches.items():
            if 1 < len(branch.run) <= sequence.branch_room:
                shares: list[float] = []
                if branch.run_shares[0] > 0.0:
                    # The tokens after the first are the branch's main guesses.
                    shares = [share or sequence.acceptance for share in branch.run_shares]
                sequence.branch(at, branch.run, shares)
        sequence.give_up_branches()

    def _offer_leaves(self, draft: CachedDraft) -> None:
        """Offer the best tokens beside this round's guesses, where trees are verified.

        Beside a SPARSE chain it offers none, because such a chain carries distributions and is
        verified without branches.
        """
        sequence = draft.sequence
        if sequence.tree_room > 0 and draft.distribution is not DraftDistribution.SPARSE:
            leaves = [
                Branch(at, [token], [share])
                for at in range(draft.round_start_count, draft.guess_count)
                for token, share in draft.alternatives[at]
                if share > 0.0
            ]
            offer_likeliest(sequence, leaves)


def _load_model(
    settings: ModelSettings, place: PlacementPlan, thread: ThreadPoolExecutor
) -> tuple[DraftModel, str, str]:
    """Return the model, the fingerprint of the target's tokenizer, and the weights' version.

    `thread` calls this.
    """
    from drafter_svc.families.draft_model import DraftModel
    from drafter_svc.families.vocabulary import load_vocabulary
    from outrider.grammar.compiler import GrammarCompiler

    load = partial(_load_runner, settings, place)
    runner, version = load_versioned("model", settings.model, load)
    ids = settings.model, runner.vocab_size, runner.eos_token_ids
    spoken = fingerprint(load_tokenizer(settings.target or settings.model))
    vocabulary = None
    if spoken != fingerprint(load_tokenizer(settings.model)):
        vocabulary = load_vocabulary(*ids, settings.target)
        ids = settings.target, vocabulary.vocab_size, vocabulary.end_ids
    model = DraftModel(
        runner,
        thread,
        max_batch_tokens=_MAX_BATCH_TOKENS,
        # The verifier has checked the grammars.
        grammars=GrammarCompiler(*ids, trusted=True),
        vocabulary=vocabulary,
    )
    return model, spoken, version


def _load_runner(settings: ModelSettings, place: PlacementPlan) -> ModelRunner:
    """Load the model and capture its CUDA graphs. The model's thread calls this."""
    from outrider.lm.devices import find_device
    from outrider.lm.runner import Bounds, ModelRunner
    from outrider.lm.streams import use_own_stream

    device = find_device("cpu" if place.kind != "local" else settings.device)
    use_own_stream(device)
    # Once the KV cache has a sequence's prompt, it lacks at most 2 of the sequence's tokens: the
    # verifier's committed token and the last guess.
    bounds = Bounds(_GRAPHED_SEQUENCES, 2, _MAX_BATCH_TOKENS)
    runner = ModelRunner.load(
        settings.model,
        dtype=settings.dtype,
        int8=INT8[settings.weights],
        device=str(device),
        page_count=settings.page_count,
        bounds=bounds,
        memory_share=settings.gpu_memory_share,
        threads=place.threads,
        trust_remote_code=settings.trust_remote_code,
    )
    runner.capture(bounds)
    return runner
