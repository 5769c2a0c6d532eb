"""The production families in virtual time: only lookups' and forwards' durations, and what a draft model says, are replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

from bench.simulator.costs import DraftingCost
from bench.simulator.events import Events, Until, Work
from bench.simulator.scenario import DrafterSpec
from bench.simulator.world import RIGHT, World
from drafter_svc.families.cached_draft import CachedDraft
from drafter_svc.families.draft_model import DraftModel, _Round
from drafter_svc.families.forwards import Forwards, Guess
from drafter_svc.families.model import ModelFamily
from drafter_svc.families.ngram import NgramFamily
from drafter_svc.families.shared_pages import SharedPagePool
from drafter_svc.pools.memory import MemoryPool, NgramOptions
from drafter_svc.pools.redis import Query, RedisOptions, RedisPool
from outrider.drafter.draft_sequence import DraftSequence
from outrider.lm.runner import ModelRunner, SequenceSlice

_POOL_ENTRIES = 1_000_000
# No text has this token, so a guess of it is wrong.
_WRONG = 2**30
# Pages of a draft model's cache, and the rest of what its runner says of itself.
_PAGES, _PAGE_SIZE, _CONTEXT = 65_536, 16, 2**20


@dataclass(slots=True)
class Process:
    """What the connections of one drafter process share: its processor, and its pool of all requests' n-grams."""

    free_at: float = 0.0
    """When what it computes on its event loop is done."""
    pool: MemoryPool | None = None
    model: SimulatedDraftModel | None = None


@dataclass(slots=True)
class SimulatedRedis:
    """A `RedisPool` without a server: writes are there at once, and a lookup takes as long as it is told."""

    lookup_s: float
    entries: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def tenant(self, name: str) -> str:
        return name

    def offer(self, tenant: str, ngram: Sequence[int], continuation: Sequence[int]) -> None:
        self.entries[tuple(ngram)] = list(continuation)

    async def lookup(self, queries: Sequence[Query]) -> list[list[int]]:
        """As `RedisPool.lookup`: nothing is found once the drafter's patience is over."""
        max_wait_s = RedisOptions().budget_s
        await Work([min(self.lookup_s, max_wait_s)])
        if self.lookup_s > max_wait_s:
            return [[] for _ in queries]
        return [self._longest(query.ngrams) for query in queries]

    def _longest(self, ngrams: Sequence[Sequence[int]]) -> list[int]:
        found = (self.entries.get(tuple(ngram)) for ngram in ngrams)
        return next((run for run in found if run), [])

    async def aclose(self) -> None:
        """There is no connection to close."""


class SimulatedNgram(NgramFamily):
    """Looks up in the real tokens of a recording."""

    def __init__(
        self, spec: DrafterSpec, cost: DraftingCost, process: Process, redis: SimulatedRedis | None
    ) -> None:
        options = NgramOptions(spec.max_draft_len, spec.max_matching_ngram_size)
        if spec.is_public_pool and process.pool is None:
            process.pool = MemoryPool(options, _POOL_ENTRIES)
        super().__init__(options, _POOL_ENTRIES, process.pool, cast(RedisPool | None, redis))
        self.name = spec.family or spec.name
        self._cost = cost
        self._slowness = spec.slowness

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        cost = self._cost
        branching = len([sequence for sequence in sequences if sequence.room == 0])
        seconds = (
            cost.round_s
            + (len(sequences) - branching) * cost.sequence_s
            + branching * cost.branches_s
        )
        if seconds > 0.0:
            await Work([self._slowness * seconds])
        await super().propose(sequences, interrupted)


class SimulatedModel(ModelFamily):
    """Grows chains and branches with the process's draft model."""

    def __init__(self, spec: DrafterSpec, model: SimulatedDraftModel) -> None:
        super().__init__(model, model.runner.vocab_size, branch_count=spec.branches)
        self.name = spec.family or spec.name

    async def _grow(
        self, drafts: list[CachedDraft], interrupted: Callable[[], bool], *, urgent: bool
    ) -> None:
        await Until(self._model.grow(drafts, urgent=urgent, interrupted=interrupted))


class SimulatedDraftModel(DraftModel):
    """Runs the rounds of all connections; each forward takes what the table says."""

    def __init__(self, events: Events, spec: DrafterSpec, cost: DraftingCost, world: World) -> None:
        super().__init__(cast(ModelRunner, _Runner()), cast(ThreadPoolExecutor, None))
        self.observers: list[Callable[[float], None]] = []
        """Are told the seconds of each forward when it begins."""
        self._recorded = _RecordedForwards(self.runner, self.pool, spec, cost, world)
        self._forwards = self._recorded
        self._events = events
        self._rounds: list[_Round] = []
        self._busy = False

    def grow(
        self, drafts: list[CachedDraft], *, urgent: bool, interrupted: Callable[[], bool]
    ) -> Future[None]:
        """As `DraftModel.grow`, in virtual time."""
        arrived = _Round(drafts, urgent, interrupted)
        self._arriving.append(arrived)
        if not self._busy:
            self._next()
        return arrived.ended

    def _next(self) -> None:
        """Begin the next forward, if there is anything to guess. Its guesses count from its end, when this is called again."""
        for each in self._rounds:
            if each.interrupted():
                each.drafts = []
        self._recorded.forward_s = 0.0
        if self._take_arriving(self._rounds):
            self._rounds = self._advance(self._rounds)
        seconds = self._recorded.forward_s
        self._busy = seconds > 0.0
        if self._busy:
            for observer in self.observers:
                observer(seconds)
            self._events.after(seconds, self._next)


class _Runner:
    """What the family asks of a runner, without a model."""

    device = "cpu"
    vocab_size = 2**32
    page_count = _PAGES
    page_size = _PAGE_SIZE
    context_length = _CONTEXT
    decoder = "in C"


class _RecordedForwards(Forwards):
    """Says what the recording says that the draft model guesses, and how long the last forward takes."""

    def __init__(
        self,
        runner: ModelRunner,
        pool: SharedPagePool,
        spec: DrafterSpec,
        cost: DraftingCost,
        world: World,
    ) -> None:
        super().__init__(runner, pool, 512, 32, None)
        self.forward_s = 0.0
        """Of the last forward."""
        self._name = spec.family or spec.name
        self._world = world
        self._cost = cost
        self._slowness = spec.slowness

    def _continue(self, drafts: list[CachedDraft], count: int) -> list[list[int]] | None:
        self.forward_s = self._slowness * (
            self._cost.round_s + count * self._cost.of_run_token(len(drafts))
        )
        runs = [self._run(draft, count) for draft in drafts]
        return [list(row) for row in zip(*runs, strict=True)]

    def _run(self, draft: CachedDraft, count: int) -> list[int]:
        run: list[int] = []
        while len(run) < count:
            run.append(self._likeliest(draft, run)[0])
        return run

    def _score(self, slices: list[SequenceSlice], scored: list[CachedDraft]) -> list[Guess | None]:
        tokens = sum([len(part.token_ids) for part in slices])
        seconds = self._cost.round_s + (tokens - len(slices)) * self._cost.prompt_token_s
        self.forward_s = self._slowness * (seconds + self._cost.of_token(len(slices)))
        found = [self._likeliest(draft, []) for draft in scored]
        return [Guess(likeliest[0], likeliest) for likeliest in found]

    def _likeliest(self, draft: CachedDraft, further: list[int]) -> list[int]:
        """The tokens that the draft model holds for the likeliest, the first of all first. Behind a wrong guess all are wrong."""
        committed, guessed = draft.sequence.tokens, [*draft.guessed, *further]
        text = self._world.text_of(committed, len(guessed) + 1)
        first = len(committed) - text.prompt_length
        at = first + len(guessed)
        wrong = [_WRONG + i for i in range(4)]
        if text.tokens[first:at] != guessed:
            return wrong
        recorded = text.guesses.get(self._name, "")[at : at + 1]
        rank = 0 if recorded == RIGHT else int(recorded) if recorded.isdigit() else None
        if rank is not None and rank < len(wrong):
            wrong[rank] = text.tokens[at]
        return wrong
