"""The verifier's Prometheus metrics; the speculative ones have vLLM's names and definitions, under the prefix `outrider:`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.limits import MAX_DRAFT_TOKENS
from verifier_svc.engine.scheduler import Scheduler
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.step_clock import StepClock
from verifier_svc.state.trie import CommitWalk, LookupResult

_MODEL = ["model_name"]
_LABELS = [*_MODEL, "drafter", "placement"]
_POSITIONS = [str(position) for position in range(MAX_DRAFT_TOKENS)]


def _doubling(first: float, count: int) -> list[float]:
    """Bounds of a histogram's buckets, each twice the one before."""
    return [first * 2**i for i in range(count)]


class Metrics:
    """Counters of one verifier, in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._pending: dict[tuple[Counter, tuple[str, ...]], float] = {}
        self._generated_count = 0
        self._by_drafter: list[Counter | Histogram] = []
        self._answers: dict[Drafter, list[float]] = {}
        self._walks: dict[tuple[Drafter, LookupResult], tuple[int, int]] = {}
        self._verified: dict[tuple[Drafter, int, int], int] = {}
        # Of the scheduler's counts, what was counted here: tokens looked for and found, preemptions.
        self._scheduled = (0, 0, 0)
        self._register_drafts()
        self._register_steps()
        self._register_requests()

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        counter = Counter(f"outrider:{name}", text, labels, registry=self.registry)
        self._by_drafter += [counter] if "drafter" in labels else []
        return counter

    def _histogram(
        self, name: str, text: str, buckets: list[float], labels: list[str]
    ) -> Histogram:
        histogram = Histogram(
            f"outrider:{name}", text, labels, buckets=buckets, registry=self.registry
        )
        self._by_drafter += [histogram] if "drafter" in labels else []
        return histogram

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"outrider:{name}", text, _MODEL, registry=self.registry)

    def _register_drafts(self) -> None:
        """What becomes of each drafter's drafts."""
        counter = self._counter
        self._drafts = counter(
            "spec_decode_num_drafts", "Steps of a sequence that verified a draft.", _LABELS
        )
        self._draft_tokens = counter(
            "spec_decode_num_draft_tokens", "Draft tokens verified.", _LABELS
        )
        self._accepted_tokens = counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted.", _LABELS
        )
        self._accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            [*_LABELS, "position"],
        )
        self._proposed_tokens = counter("proposed_tokens", "Draft tokens received.", _LABELS)
        self._received = counter("draft_bytes", "Bytes of proposals and skips received.", _LABELS)
        self._stale_tokens = counter(
            "stale_tokens",
            "Draft tokens that the commit contradicted before they came, or whose sequence was over.",
            _LABELS,
        )
        self._cut_tokens = counter(
            "cut_tokens", "Draft tokens received that the window had no room for.", _LABELS
        )
        self._ignored = counter(
            "ignored_messages",
            "Messages received of a kind that this version does not know.",
            _LABELS,
        )
        self._hits = counter(
            "draft_lookups",
            "Commits by what they found: the next draft on the chain or in a side branch, nothing yet (late), or a miss.",
            [*_LABELS, "result"],
        )
        self._wasted_tokens = counter(
            "wasted_tokens", "Draft tokens that were dropped without being committed.", _LABELS
        )
        self._draft_seconds = self._histogram(
            "draft_latency_seconds",
            "From a verdict to the first draft that answers it.",
            _doubling(0.000125, 16),
            _LABELS,
        )

    def _register_steps(self) -> None:
        """What steps take."""
        self._decode_seconds = self._counter(
            "decode_seconds", "Time of steps without prompts, waits included.", _MODEL
        )
        self._isolated_seconds = self._counter(
            "decode_isolated_forward_seconds",
            "What their forwards took before any request.",
            _MODEL,
        )
        self._phase_seconds = self._counter(
            "step_phase_seconds",
            "Time of engine steps by phase: wait (for drafts), pack, forward, accept, commit, send.",
            [*_MODEL, "phase"],
        )
        self._step_seconds = self._histogram(
            "step_seconds", "Time of one engine step.", _doubling(0.001, 14), _MODEL
        )
        self._batch = self._histogram(
            "step_sequences", "Sequences in one step.", _doubling(1.0, 11), _MODEL
        )

    def _register_requests(self) -> None:
        """What requests hold, wait for and get."""
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        self._generated = counter("generation_tokens", "Tokens committed.", _MODEL)
        self._preemptions = counter(
            "num_preemptions", "Sequences whose pages were taken and recomputed later.", _MODEL
        )
        self._prefix_queries = counter("prefix_cache_queries", "Tokens of admitted texts.", _MODEL)
        self._prefix_hits = counter(
            "prefix_cache_hits", "Those of them that the prefix cache held.", _MODEL
        )
        self._integrity_failures = counter(
            "integrity_failures",
            "Checks of the page pool that failed when the engine went idle.",
            _MODEL,
        )
        self._running = gauge("num_requests_running", "Sequences in the batch.")
        self._waiting = gauge("num_requests_waiting", "Sequences in the queue.")
        self._pages = gauge("kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.")
        self._queue_seconds = histogram(
            "request_queue_time_seconds",
            "From arrival to the first step.",
            _doubling(0.0005, 18),
            _MODEL,
        )
        self._prefill_seconds = histogram(
            "request_prefill_time_seconds",
            "From the first step to the first token.",
            _doubling(0.001, 16),
            _MODEL,
        )

    def _labels(self, drafter: Drafter) -> tuple[str, str, str]:
        return self._model_name, drafter.id, drafter.hello.placement.kind

    def _add(self, counter: Counter, labels: tuple[str, ...], amount: float = 1.0) -> None:
        """Counted when `flush` comes: a counter's lock and labels cost more than all else that a sequence's step counts."""
        key = (counter, labels)
        self._pending[key] = self._pending.get(key, 0.0) + amount

    def flush(self) -> None:
        """Let what was noted since the last time show."""
        self._spread()
        self._generated.labels(self._model_name).inc(self._generated_count)
        self._generated_count = 0
        pending, self._pending = self._pending, {}
        for (counter, labels), amount in pending.items():
            counter.labels(*labels).inc(amount)
        for drafter, answers in self._answers.items():
            histogram = self._draft_seconds.labels(*self._labels(drafter))
            for seconds in answers:
                histogram.observe(seconds)
        self._answers.clear()

    def forget(self, drafter_id: str) -> None:
        """A drafter is gone for good."""
        self.flush()
        for metric in self._by_drafter:
            metric.remove_by_labels({"drafter": drafter_id})

    def _spread(self) -> None:
        """Counters of what was noted once for each sequence."""
        for (drafter, result), (count, wasted) in self._walks.items():
            self._add(self._hits, (*self._labels(drafter), result.value), count)
            self._add(self._wasted_tokens, self._labels(drafter), wasted)
        for (drafter, drafted, accepted), count in self._verified.items():
            labels = self._labels(drafter)
            self._add(self._drafts, labels, count)
            self._add(self._draft_tokens, labels, count * drafted)
            self._add(self._accepted_tokens, labels, count * accepted)
            for position in range(min(accepted, MAX_DRAFT_TOKENS)):
                self._add(self._accepted_per_pos, (*labels, _POSITIONS[position]), count)
        self._walks.clear()
        self._verified.clear()

    def received(self, drafter: Drafter, byte_count: int) -> None:
        """A message of a draft stream arrived."""
        self._add(self._received, self._labels(drafter), byte_count)

    def ignored(self, drafter: Drafter) -> None:
        """A message of a draft stream arrived whose kind is not known."""
        self._add(self._ignored, self._labels(drafter))

    def answered(self, drafter: Drafter, seconds: list[float]) -> None:
        """A drafter's first answers to verdicts came after so many seconds each."""
        self._answers.setdefault(drafter, []).extend(seconds)

    def proposed(
        self, drafter: Drafter, token_count: int, stale_count: int, cut_count: int
    ) -> None:
        """Proposals arrived with so many tokens, some of which were stale, and some cut."""
        labels = self._labels(drafter)
        self._add(self._proposed_tokens, labels, token_count)
        self._add(self._stale_tokens, labels, stale_count)
        if cut_count:
            self._add(self._cut_tokens, labels, cut_count)

    def walked(self, drafter: Drafter, walk: CommitWalk) -> None:
        """A trie's root moved along a commit."""
        key = (drafter, walk.result)
        count, wasted = self._walks.get(key, (0, 0))
        self._walks[key] = (count + 1, wasted + walk.wasted)

    def verified(self, drafter: Drafter, drafted: int, accepted: int) -> None:
        """A draft was verified."""
        key = (drafter, drafted, accepted)
        self._verified[key] = self._verified.get(key, 0) + 1

    def generated(self, token_count: int) -> None:
        """Tokens were committed."""
        self._generated_count += token_count

    def queued(self, seconds: float) -> None:
        """A sequence became part of a batch."""
        self._queue_seconds.labels(self._model_name).observe(seconds)

    def prefilled(self, seconds: float) -> None:
        """A sequence's first token was committed."""
        self._prefill_seconds.labels(self._model_name).observe(seconds)

    def integrity_failed(self) -> None:
        """The check of the idle engine's page pool failed."""
        self._integrity_failures.labels(self._model_name).inc()

    def step(self, clock: StepClock, isolated_forward_s: float, sequence_count: int) -> None:
        """An engine step of so many sequences ended; its forward takes `isolated_forward_s` on an idle machine, 0 if not known."""
        self._step_seconds.labels(self._model_name).observe(clock.step_s)
        self._batch.labels(self._model_name).observe(sequence_count)
        for name, seconds in {"wait": clock.wait_s, **clock.phases_s}.items():
            self._phase_seconds.labels(self._model_name, name).inc(seconds)
        if isolated_forward_s > 0.0:
            self._decode_seconds.labels(self._model_name).inc(clock.wait_s + clock.step_s)
            self._isolated_seconds.labels(self._model_name).inc(isolated_forward_s)

    def occupancy(self, scheduler: Scheduler) -> None:
        """What the engine holds now, and what became of texts that it admitted."""
        name, pool = self._model_name, scheduler.pool
        self._running.labels(name).set(len(scheduler.running))
        self._waiting.labels(name).set(len(scheduler.waiting))
        self._pages.labels(name).set(pool.used_count / pool.page_count)
        queried, hits, preempted = self._scheduled
        self._prefix_queries.labels(name).inc(scheduler.prompt_token_count - queried)
        self._prefix_hits.labels(name).inc(scheduler.cached_token_count - hits)
        self._preemptions.labels(name).inc(scheduler.preemption_count - preempted)
        self._scheduled = (
            scheduler.prompt_token_count,
            scheduler.cached_token_count,
            scheduler.preemption_count,
        )
