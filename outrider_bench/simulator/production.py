"""The production families in virtual time.

Only two things are simulated: how long lookups and forwards take, and the draft model's answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import torch

from drafter_svc.families.cached_draft import CachedDraft, Guess
from drafter_svc.families.draft_model import DraftModel, _Round
from drafter_svc.families.forwards import Forwards
from drafter_svc.families.model import ModelFamily
from drafter_svc.families.ngram import NgramFamily
from drafter_svc.families.shared_pages import SharedPagePool
from drafter_svc.pools.memory import MemoryPool, NgramOptions
from outrider.drafter.draft_sequence import DraftSequence
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider_bench.simulator.costs import DraftingCost
from outrider_bench.simulator.events import Events, Until, Work
from outrider_bench.simulator.heads import SimulatedHead
from outrider_bench.simulator.scenario import DrafterSpec
from outrider_bench.simulator.world import RIGHT, World

_POOL_ENTRIES = 1_000_000
# No sequence has this token, so a guess of it is wrong.
_WRONG = 2**30
# The probabilities that a draft model estimates for its likeliest tokens in a tree, the best first.
# A recording has only ranks. The verifier corrects the estimates after each commit.
_SHARES = [0.7, 0.12, 0.06, 0.03]
# The number and the size of the pages of a draft model's cache, and its context length in tokens.
_PAGES = 65_536
_PAGE_SIZE = 16
_CONTEXT = 2**20


@dataclass(slots=True)
class Process:
    """A drafter process: its connections share its processor and its pool of n-grams."""

    free_at: float = 0.0
    """The time at which the process's event loop has done all planned work."""
    pool: MemoryPool | None = None
    model: SimulatedDraftModel | None = None
    head: SimulatedHead | None = None


class SimulatedNgram(NgramFamily):
    """The production n-gram family, on the tokens of a recording."""

    # A fault ends the simulation.
    fatal = (Exception,)

    def __init__(self, spec: DrafterSpec, cost: DraftingCost, process: Process) -> None:
        options = NgramOptions(spec.max_draft_len, spec.max_matching_ngram_size)
        if spec.is_public_pool and process.pool is None:
            process.pool = MemoryPool(options, _POOL_ENTRIES)
        super().__init__(options, _POOL_ENTRIES, process.pool)
        self.name = spec.family or spec.name
        self._cost = cost
        self._slowness = spec.slowness

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Propose as in production, after the time that the cost table states."""
        cost = self._cost
        full = len([sequence for sequence in sequences if sequence.remaining_window == 0])
        trees = len([sequence for sequence in sequences if sequence.wants_tree])
        branching = max(full, trees)
        chains_s = (len(sequences) - full) * cost.sequence_s
        seconds = cost.round_s + chains_s + branching * cost.branches_s
        if seconds > 0.0:
            await Work([self._slowness * seconds])
        await super().propose(sequences, interrupted)


class SimulatedModel(ModelFamily):
    """The production draft-model family, with its process's simulated draft model."""

    def __init__(self, spec: DrafterSpec, model: SimulatedDraftModel) -> None:
        super().__init__(model, model.runner.vocab_size)
        self.name = spec.family or spec.name

    async def _grow(
        self, drafts: list[CachedDraft], interrupted: Callable[[], bool], *, urgent: bool
    ) -> None:
        await Until(self._model.grow(drafts, urgent=urgent, interrupted=interrupted))


class SimulatedDraftModel(DraftModel):
    """Runs the rounds of all connections; the cost table states each forward's time."""

    # A fault ends the simulation. In virtual time, a round that is tried again would never end.
    fatal = (Exception,)

    def __init__(self, events: Events, spec: DrafterSpec, cost: DraftingCost, world: World) -> None:
        super().__init__(cast(ModelRunner, _Runner()), cast(ThreadPoolExecutor, None))
        self.observers: list[Callable[[float], None]] = []
        """Called with the seconds of each forward when it begins."""
        self._recorded = _RecordedForwards(self.runner, self.pool, spec, cost, world)
        self._forwards = self._recorded
        self._events = events
        self._rounds: list[_Round] = []
        self._busy = False

    def grow(
        self, drafts: list[CachedDraft], *, urgent: bool, interrupted: Callable[[], bool]
    ) -> Future[None]:
        """Start a round as `DraftModel.grow` does, in virtual time."""
        arrived = _Round(drafts, urgent, interrupted)
        self._arriving.append(arrived)
        if not self._busy:
            self._next()
        return arrived.ended

    def _next(self) -> None:
        """Start the next forward, if there is anything to guess.

        The forward's guesses are ready at its end, when this is called again.
        """
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
    """The attributes of a runner that the family reads; there is no model."""

    device = torch.device("cpu")
    vocab_size = 2**32
    page_count = _PAGES
    page_size = _PAGE_SIZE
    context_length = _CONTEXT
    continues = True
    parallel_token_id = None


class _RecordedForwards(Forwards):
    """Takes the draft model's guesses from the recording, and forwards' times from the table."""

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
        """Seconds of the last forward."""
        self._name = spec.family or spec.name
        self._world = world
        self._cost = cost
        self._slowness = spec.slowness

    def _continue(self, drafts: list[CachedDraft], count: int) -> list[list[Guess]] | None:
        run_s = count * self._cost.of_run_token(len(drafts))
        self.forward_s = self._slowness * (self._cost.round_s + run_s)
        return [self._run(draft, count) for draft in drafts]

    def _run(self, draft: CachedDraft, count: int) -> list[Guess]:
        run: list[Guess] = []
        for _ in range(count):
            run.append(_guess(draft, self._likeliest(draft, [guess.token for guess in run])))
        return run

    def _score(self, slices: list[SequenceSlice], scored: list[CachedDraft]) -> list[Guess | None]:
        tokens = sum([len(part.token_ids) for part in slices])
        seconds = self._cost.round_s + (tokens - len(slices)) * self._cost.prompt_token_s
        self.forward_s = self._slowness * (seconds + self._cost.of_token(len(slices)))
        return [_guess(draft, self._likeliest(draft, [])) for draft in scored]

    def _likeliest(self, draft: CachedDraft, further: list[int]) -> list[int]:
        """Return the draft model's likeliest tokens after its guesses and `further`, best first.

        All tokens after a wrong guess are wrong.
        """
        committed = draft.sequence.tokens
        guessed = [*draft.guessed, *further]
        text = self._world.text_of(committed, len(guessed) + 1)
        first = len(committed) - text.prompt_length
        at = first + len(guessed)
        likeliest = [_WRONG + i for i in range(4)]
        if text.tokens[first:at] != guessed:
            return likeliest
        recorded = text.guesses.get(self._name, "")[at : at + 1]
        if recorded == RIGHT:
            likeliest[0] = text.tokens[at]
        elif recorded.isdigit() and int(recorded) < len(likeliest):
            likeliest[int(recorded)] = text.tokens[at]
        return likeliest


def _guess(draft: CachedDraft, likeliest: list[int]) -> Guess:
    """Guess the likeliest token, with estimated probabilities if the verifier verifies trees."""
    return Guess(likeliest[0], likeliest, shares=_SHARES if draft.sequence.wants_tree else None)
