"""Trial forwards before the first request: they choose kernels and start the cost model."""

from __future__ import annotations

from outrider.clock import Clock
from outrider.lm.pages import PagePool
from outrider.lm.runner import SequenceSlice
from verifier_svc.engine.target import LanguageModel, Limits
from verifier_svc.policy.forward_cost import ForwardCost

# Trial forwards end after about so long, before the larger batches of a large model.
_WARM_UP_S = 5.0
# Tokens of the prompt that is tried.
_TRIAL_PROMPT = 256


class WarmUp:
    """Tries forwards of many sizes behind `context` tokens each, as far as there are pages.

    Only before the first request, since it writes to pages without reserving them.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: PagePool,
        limits: Limits,
        context: int,
        clock: Clock,
    ) -> None:
        self._model = model
        self._pool = pool
        self._limits = limits
        self._context = context
        self._clock = clock

    def calibrate(self, cost: ForwardCost, isolated_cost: ForwardCost) -> None:
        """Measure, and teach both what forwards cost; only `cost` learns the cost of prompts."""
        largest = self._limits.max_sequences
        end = self._clock() + _WARM_UP_S
        self._try_batch(1, cost, isolated_cost)
        if self._clock() < end:
            self._try_prompts(cost)
        # The largest first, in case there is not the time for those between.
        for batch in dict.fromkeys([largest, *(2**i for i in range(3, largest.bit_length()))]):
            if batch > 1 and self._clock() < end:
                self._try_batch(batch, cost, isolated_cost)

    def _try_prompts(self, cost: ForwardCost) -> None:
        """Measure a short and a long prompt."""
        held = self._pool.page_count * self._pool.page_size
        longest = min(_TRIAL_PROMPT, self._context, self._limits.max_batch_tokens, held)
        if longest > 3:
            counts = (longest // 4, longest)
            short, long = ((count, self._trial_s(1, count, 0, 1)) for count in counts)
            cost.calibrate_prompts(short, long)

    def _try_batch(self, batch: int, *costs: ForwardCost) -> None:
        """Measure forwards of `batch` sequences with none, some and all of the draft tokens."""
        limits, pool, deepest = self._limits, self._pool, self._limits.depth.max_draft_tokens
        for count in sorted({1, 2, 1 + deepest // 2, 1 + deepest}):
            pages = batch * -(-count // pool.page_size)
            if batch * count <= limits.max_batch_tokens and pages <= pool.page_count:
                seconds = self._trial_s(batch, count, self._context, count)
                for cost in costs:
                    cost.calibrate(batch, batch * count, seconds)

    def _trial_s(self, batch: int, count: int, context: int, logit_count: int) -> float:
        """Time of one forward of `batch` sequences, `count` new tokens each behind `context` zeros.

        The faster of two runs, in seconds. Each sequence has `logit_count` rows of logits.
        """
        size = self._pool.page_size
        length = max(min(context, self._pool.page_count // batch * size), count)
        pages = -(-length // size)
        slices = []
        for i in range(batch):
            own = list(range(i * pages, (i + 1) * pages))
            slices.append(SequenceSlice([0] * count, length - count, own, logit_count))
        times = []
        for _ in range(2):
            started = self._clock()
            # Reading a value back waits for a device that works on its own.
            self._model.forward(slices)[0, 0].item()
            times.append(self._clock() - started)
        return min(times)
