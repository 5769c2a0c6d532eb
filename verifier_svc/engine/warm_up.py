"""Runs trial forwards before the first request: they choose kernels and start the cost model."""

from __future__ import annotations

from outrider.lm.pages import PagePool
from outrider.lm.runner import SequenceSlice
from outrider.process.clock import Clock
from outrider.protocol.token_tree import MAX_TREE_TOKENS
from verifier_svc.engine.config import EngineConfig, LanguageModel
from verifier_svc.policy.forward_cost import ForwardCost

# After this many seconds no further batch size is tried. With a large model, some of the larger
# batches are then left out.
_WARM_UP_S = 5.0
# In the trial forwards with trees, each sequence has one of these numbers of rows. Other trial
# forwards have chains.
_TREE_ROWS = (16, 32, 1 + MAX_TREE_TOKENS)
# Tokens of the longer of the two trial prompts, if they fit.
_TRIAL_PROMPT = 256


class WarmUp:
    """Times forwards of many batch sizes at a length of `context` tokens, if the pages suffice.

    Use it only before the first request, because it writes to pages that it has not reserved.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: PagePool,
        config: EngineConfig,
        context: int,
        clock: Clock,
    ) -> None:
        self._model = model
        self._pool = pool
        self._config = config
        self._context = context
        self._clock = clock

    def calibrate(self, cost: ForwardCost, isolated_cost: ForwardCost) -> None:
        """Measure forwards and calibrate both cost models; only `cost` learns the prompts' cost."""
        largest = self._config.max_sequences
        end = self._clock() + _WARM_UP_S
        self._try_batch(1, cost, isolated_cost)
        if self._clock() < end:
            self._try_prompts(cost)
        # The largest batch comes first, in case no time is left for the other batches.
        batches = dict.fromkeys([largest, *(2**i for i in range(1, largest.bit_length()))])
        for batch in batches:
            if batch > 1 and self._clock() < end:
                self._try_batch(batch, cost, isolated_cost)
        for batch in dict.fromkeys([1, *batches]) if self._config.draft_trees else ():
            for count in _TREE_ROWS:
                if self._clock() < end:
                    self._try_rows(batch, count, cost, isolated_cost, branched=True)

    def _try_prompts(self, cost: ForwardCost) -> None:
        """Measure a short prompt and a long one."""
        held = self._pool.page_count * self._pool.page_size
        longest = min(_TRIAL_PROMPT, self._context, self._config.max_batch_tokens, held)
        if longest > 3:
            short = (longest // 4, self._trial_s(1, longest // 4, 0, 1))
            long = (longest, self._trial_s(1, longest, 0, 1))
            cost.calibrate_prompts(short, long)

    def _try_batch(self, batch: int, *costs: ForwardCost) -> None:
        """Measure forwards of `batch` sequences with none, some and all of the draft tokens."""
        max_draft_tokens = self._config.draft_tokens_policy.max_draft_tokens
        for count in sorted({1, 2, 1 + max_draft_tokens // 2, 1 + max_draft_tokens}):
            self._try_rows(batch, count, *costs)

    def _try_rows(
        self, batch: int, count: int, *costs: ForwardCost, branched: bool = False
    ) -> None:
        """Measure a forward of `count` rows of each of `batch` sequences, if it fits.

        If `branched`, the rows are a tree.
        """
        pages = batch * -(-count // self._pool.page_size)
        if batch * count <= self._config.max_batch_tokens and pages <= self._pool.page_count:
            seconds = self._trial_s(batch, count, self._context, count, branched=branched)
            for cost in costs:
                cost.calibrate(batch, batch * count, seconds)

    def _trial_s(
        self, batch: int, count: int, context: int, logit_count: int, *, branched: bool = False
    ) -> float:
        """Return the seconds of one forward of `batch` sequences: the faster of two runs.

        A sequence has `context` tokens: fewer if the pages do not suffice, more if `count` is
        larger. Its last `count` tokens are new, and it gets `logit_count` logits rows. If
        `branched`, all new tokens but the first are children of the first.
        """
        parents = [0] * (count - 1) if branched else []
        size = self._pool.page_size
        length = max(min(context, self._pool.page_count // batch * size), count)
        pages = -(-length // size)
        slices = []
        for i in range(batch):
            own = list(range(i * pages, (i + 1) * pages))
            slices.append(SequenceSlice([0] * count, length - count, own, logit_count, parents))
        times = []
        for _ in range(2):
            started = self._clock()
            # Reading a value waits for a device that computes asynchronously.
            self._model.forward(slices)[0, 0].item()
            times.append(self._clock() - started)
        return min(times)
