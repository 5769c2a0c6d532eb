"""The family `head` in virtual time, with recorded guesses and the times of a cost table.

Features have sizes but no content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import cast

import torch

from drafter_svc.families.head import HeadFamily
from drafter_svc.families.head_worker import HeadDraft, HeadWorker, News, Offer
from outrider.drafter.draft_sequence import DraftSequence
from outrider.lm.hidden_states import FeatureProjection
from outrider.lm.streams import SharedRows
from outrider.protocol.draft_messages import FINAL_STATE, FeatureDtype, FeatureRequest
from outrider_bench.simulator.costs import DraftingCost
from outrider_bench.simulator.events import Events, Until
from outrider_bench.simulator.scenario import DrafterSpec
from outrider_bench.simulator.world import World

VOCAB = 2**32
"""Larger than any target's vocabulary: recorded offers have the target's ids."""
_LAYERS = 1000
# A round's time in the cost table includes reading this many rows of features per sequence.
_ROWS_OF_A_ROUND = 2


class SimulatedStates:
    """A `FeatureSource` whose hidden states have the given size and are all zeros."""

    layer_count = _LAYERS

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self.projections: Mapping[str, FeatureProjection] = {}
        self.kept = range(FINAL_STATE, _LAYERS + 1)

    def can_watch(self, states: Collection[int]) -> bool:
        """Return True, since the simulator serves any states."""
        return True

    def watch(self, states: Collection[int]) -> None:
        """Do nothing."""

    def copy_states(
        self, states: Sequence[int], rows: Sequence[int], dtype: str, projection: str = ""
    ) -> bytes:
        """Like FeatureSource."""
        size = len(states) * self.hidden_size * FeatureDtype[dtype.upper()].size
        return bytes(len(rows) * size)

    def share_states(
        self, states: Sequence[int], rows: Sequence[int], dtype: str, projection: str = ""
    ) -> SharedRows:
        """Like FeatureSource."""
        zero = torch.zeros(1, dtype=getattr(torch, dtype))
        return SharedRows.of(zero.expand(len(rows), len(states) * self.hidden_size))


class SimulatedHead:
    """A `HeadWorker` that computes nothing. Rounds follow each other, as on a worker's thread."""

    fatal = (Exception,)
    device = torch.device("cpu")

    def __init__(
        self,
        events: Events,
        spec: DrafterSpec,
        cost: DraftingCost,
        world: World,
        hidden_size: int,
    ) -> None:
        self.observers: list[Callable[[float], None]] = []
        """Called with the seconds of each round or reading of a prompt, when it is planned."""
        self.feature_request = FeatureRequest(tuple(range(spec.states)))
        self._name = spec.family or spec.name
        self._events = events
        self._slowness = spec.slowness
        self._cost = cost
        self._world = world
        self._width = spec.states * hidden_size
        self._free_at = 0.0
        # Maps a sequence to the position after the last feature that arrived.
        self._ends: dict[HeadDraft, int] = {}

    def width(self, *, projected: bool) -> int:
        """Return the size of a feature."""
        return self._width

    def begin(self, sequence: DraftSequence, seed: int, *, projected: bool) -> HeadDraft:
        """Like HeadWorker."""
        return HeadDraft(sequence, seed, self._width, torch.bfloat16, projected)

    def close(self, draft: HeadDraft) -> None:
        """Like HeadWorker."""
        self._ends.pop(draft, None)

    def read(self, draft: HeadDraft, news: News) -> None:
        """Spend the time for reading a prompt's features."""
        self._work(self._take(draft, news) * self._cost.prompt_token_s)

    def draft(
        self, drafts: Sequence[HeadDraft], wanted: Sequence[int], *, trees: bool
    ) -> Future[list[Offer | None]]:
        """Draft as HeadWorker does; the offers come after the time that the cost table states."""
        rows = sum([self._take(draft, draft.take_news()) for draft in drafts])
        ready = [self._ends.get(draft) == len(draft.sequence.tokens) - 1 for draft in drafts]
        offers = [
            self._offer(draft, count) if has_all else None
            for draft, count, has_all in zip(drafts, wanted, ready, strict=True)
        ]
        cost, count = self._cost, sum(ready)
        seconds = cost.round_s + len(drafts) * cost.sequence_s
        seconds += max(0, rows - _ROWS_OF_A_ROUND * len(drafts)) * cost.prompt_token_s
        if count:
            token_s = cost.of_tree_token(count) if trees else cost.of_token(count)
            seconds += (max(wanted) - 1) * token_s
        done: Future[list[Offer | None]] = Future()
        self._events.at(self._work(seconds), lambda: done.set_result(offers))
        return done

    def _take(self, draft: HeadDraft, news: News) -> int:
        """Note the features of a sequence that have come; return their number."""
        rows = sum(map(len, news.features))
        if rows:
            self._ends[draft] = news.first_position + rows
        return rows

    def _work(self, seconds: float) -> float:
        """Work for `seconds` after earlier work is done; return the time of the end."""
        seconds *= self._slowness
        for observer in self.observers:
            observer(seconds)
        self._free_at = max(self._free_at, self._events.now) + seconds
        return self._free_at

    def _offer(self, draft: HeadDraft, count: int) -> Offer | None:
        """Return the recorded offer after the committed text, cut to `count` guesses."""
        tokens = draft.sequence.tokens
        text = self._world.text_of(tokens, 1)
        offers = self._world.offers.get(tuple(text.prompt_ids), {}).get(self._name, ())
        at = len(tokens) - text.prompt_length
        if at >= len(offers):
            return None
        found = offers[at]
        return Offer(
            found.tokens[:count],
            found.confidences[:count],
            found.alternatives[:count],
            [each for each in found.deeper if each.at + len(each.run) <= count],
        )


class SimulatedHeadFamily(HeadFamily):
    """The production family with a simulated worker."""

    def __init__(self, spec: DrafterSpec, worker: SimulatedHead) -> None:
        super().__init__(cast(HeadWorker, worker), VOCAB)
        self.name = spec.family or spec.name

    async def _drafted(
        self, drafts: Sequence[HeadDraft], wanted: Sequence[int], *, trees: bool
    ) -> list[Offer | None]:
        done = self.worker.draft(drafts, wanted, trees=trees)
        await Until(done)
        return done.result()
