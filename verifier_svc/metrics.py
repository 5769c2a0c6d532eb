"""The verifier's Prometheus metrics.

The metrics of speculation have vLLM's names and definitions, under the prefix `outrider:`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.protocol.limits import MAX_DRAFT_TOKENS
from outrider.protocol.messages import PauseReason
from verifier_svc.state.drafter import Drafter
from verifier_svc.state.occupancy import Occupancy
from verifier_svc.state.step_clock import StepTimes
from verifier_svc.state.trie import CommitWalk, LookupResult

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)
_MODEL = ["model_name"]
_LABELS = [*_MODEL, "drafter", "family", "placement"]
_SHAPE = [*_MODEL, "shape"]
_WEIGHTS = [*_MODEL, "drafter", "weights_version"]
# Number of versions of a drafter's weights that have counts: the present and the previous version.
_VERSIONS = 2
_PHASES = ["wait", "pack", "forward", "accept", "commit", "send"]
_POSITIONS = [str(position) for position in range(MAX_DRAFT_TOKENS)]


def _doubling(first: float, count: int) -> list[float]:
    """Return the bucket bounds of a histogram, each twice the bound before it."""
    return [first * 2**i for i in range(count)]


class _Registry:
    """Creates metrics under the prefix `outrider:`.

    `by_drafter` lists the metrics that have the label `drafter`.
    """

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        self.by_drafter: list[Counter | Gauge | Histogram] = []

    def counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return self._metric(Counter, name, text, labels)

    def histogram(
        self, name: str, text: str, buckets: list[float], labels: list[str] = _MODEL
    ) -> Histogram:
        return self._metric(Histogram, name, text, labels, buckets=buckets)

    def gauge(self, name: str, text: str, labels: list[str] = _MODEL) -> Gauge:
        return self._metric(Gauge, name, text, labels)

    def _metric(
        self, kind: type[_Metric], name: str, text: str, labels: list[str], **options: Any
    ) -> _Metric:
        metric = kind(f"outrider:{name}", text, labels, registry=self.collectors, **options)
        if "drafter" in labels:
            self.by_drafter.append(metric)
        return metric


class _DraftMetrics:
    """The metrics of each drafter's drafts."""

    def __init__(self, registry: _Registry) -> None:
        counter = registry.counter
        self.drafts = counter(
            "spec_decode_num_drafts", "Drafts verified: one for each sequence and step.", _LABELS
        )
        self.draft_tokens = counter(
            "spec_decode_num_draft_tokens", "Draft tokens verified.", _LABELS
        )
        self.accepted_tokens = counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted.", _LABELS
        )
        self.accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            [*_LABELS, "position"],
        )
        self.proposed_tokens = counter("proposed_tokens", "Draft tokens received.", _LABELS)
        self.received = counter("draft_bytes", "Bytes of proposals and skips received.", _LABELS)
        self.stale_tokens = counter(
            "stale_tokens",
            "Draft tokens that a commit had contradicted, or whose sequence had ended.",
            _LABELS,
        )
        self.cut_tokens = counter(
            "cut_tokens", "Draft tokens received that the window had no room for.", _LABELS
        )
        self.ignored = counter(
            "ignored_messages",
            "Messages received of a kind that this version does not know.",
            _LABELS,
        )
        self.hits = counter(
            "draft_lookups",
            "Commits by result: a hit on the chain or in a branch, late (no draft yet), or a miss.",
            [*_LABELS, "result"],
        )
        self.wasted_tokens = counter(
            "wasted_tokens", "Draft tokens dropped without being committed.", _LABELS
        )
        self.acceptance_fell = registry.gauge(
            "acceptance_fell",
            "1 while the drafter's acceptance is clearly below its first hour's or old weights'.",
            _LABELS,
        )
        self.drafting_paused = registry.gauge(
            "drafting_paused",
            "1 while a drafter of decoding sequences is not asked, as its drafts would not pay.",
            _LABELS,
        )
        self.draft_seconds = registry.histogram(
            "draft_latency_seconds",
            "Time from a verdict to the first draft that answers it.",
            _doubling(0.000125, 16),
            _LABELS,
        )


class _ShapeMetrics:
    """The metrics of drafts by shape: chains, or trees with branches."""

    def __init__(self, registry: _Registry) -> None:
        counter = registry.counter
        self.drafts = counter(
            "spec_decode_num_drafts_by_shape",
            "Drafts verified: one for each sequence and step.",
            _SHAPE,
        )
        self.draft_tokens = counter(
            "spec_decode_num_draft_tokens_by_shape", "Draft tokens verified.", _SHAPE
        )
        self.emitted_tokens = counter(
            "spec_decode_num_emitted_tokens_by_shape",
            "Tokens committed by steps that verified a draft, the target's own included.",
            _SHAPE,
        )
        self.accepted_tokens_by_branch = counter(
            "spec_decode_num_accepted_tokens_by_branch",
            "Draft tokens accepted on the main path, or beside it.",
            [*_MODEL, "branch"],
        )


class _WeightsMetrics:
    """The metrics of drafts by the version of the drafter's weights."""

    def __init__(self, registry: _Registry) -> None:
        self.draft_tokens = registry.counter(
            "spec_decode_num_draft_tokens_by_weights", "Draft tokens verified.", _WEIGHTS
        )
        self.accepted_tokens = registry.counter(
            "spec_decode_num_accepted_tokens_by_weights", "Draft tokens accepted.", _WEIGHTS
        )
        # Versions of weights, keyed by the drafter's id; the version that joined last comes last.
        self.versions: dict[str, list[str]] = {}


class VerifierMetrics:
    """The metrics of one verifier, in their own registry.

    The engine's thread calls the methods. Counts of drafts and of committed tokens are gathered
    until `flush`.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = _Registry()
        self.registry = self._registry.collectors
        self._model_name = model_name
        self._of_drafts = _DraftMetrics(self._registry)
        self._of_shapes = _ShapeMetrics(self._registry)
        self._of_weights = _WeightsMetrics(self._registry)
        self._paused_steps = self._registry.counter(
            "paused_steps",
            "Steps that could have verified a sequence's draft but had none, by reason.",
            [*_MODEL, "reason"],
        )
        self._pending: dict[tuple[Counter, tuple[str, ...]], float] = {}
        self._generated_count = 0
        self._answers: dict[Drafter, list[float]] = {}
        self._walks: dict[tuple[Drafter, LookupResult], tuple[int, int]] = {}
        # The present labels of each drafter that has joined and is not forgotten, keyed by its id.
        self._joined: dict[str, tuple[str, ...]] = {}
        self._verified: dict[tuple[Drafter, int, int, int], int] = {}
        self._pauses: dict[PauseReason, int] = {}
        self._exported = Occupancy()
        self._register_steps()
        self._register_requests()

    def _register_steps(self) -> None:
        """Register the metrics of the engine's steps."""
        model = self._model_name
        counter = self._registry.counter
        histogram = self._registry.histogram
        self._decode_seconds = counter(
            "decode_seconds", "Time of steps without prompts, waits included.", _MODEL
        ).labels(model)
        self._isolated_seconds = counter(
            "decode_isolated_forward_seconds",
            "Time that the forwards of these steps took in the trials before the first request.",
            _MODEL,
        ).labels(model)
        phase_seconds = counter(
            "step_phase_seconds",
            "Step time by phase: wait (for drafts), pack, forward, accept, commit, send.",
            [*_MODEL, "phase"],
        )
        self._phase_seconds = {phase: phase_seconds.labels(model, phase) for phase in _PHASES}
        self._step_seconds = histogram(
            "step_seconds", "Time of one engine step.", _doubling(0.001, 14)
        ).labels(model)
        self._batch = histogram(
            "step_sequences", "Sequences in one step.", _doubling(1.0, 11)
        ).labels(model)
        self._graphs = self._registry.gauge(
            "cuda_graphs", "CUDA graphs of the target's forward."
        ).labels(model)
        self._graph_memory = self._registry.gauge(
            "cuda_graph_memory_bytes", "Device memory that the CUDA graphs took at start."
        ).labels(model)

    def _register_requests(self) -> None:
        """Register the metrics of requests and of the KV cache."""
        model = self._model_name
        counter = self._registry.counter
        gauge = self._registry.gauge
        histogram = self._registry.histogram
        self._generated = counter("generation_tokens", "Tokens committed.", _MODEL).labels(model)
        self._preemptions = counter(
            "num_preemptions", "Sequences that lost their pages, to be recomputed later.", _MODEL
        ).labels(model)
        self._prefix_queries = counter(
            "prefix_cache_queries", "Tokens of admitted sequences.", _MODEL
        ).labels(model)
        self._prefix_hits = counter(
            "prefix_cache_hits", "Tokens of admitted sequences that the cache held.", _MODEL
        ).labels(model)
        self._integrity_failures = counter(
            "integrity_failures",
            "Checks of the page pool that failed when the engine went idle.",
            _MODEL,
        ).labels(model)
        self._running = gauge("num_requests_running", "Sequences in the batch.").labels(model)
        self._waiting = gauge("num_requests_waiting", "Sequences in the queue.").labels(model)
        self._unread = gauge(
            "num_requests_unread", "Sequences that wait for their caller to read."
        ).labels(model)
        self._pages = gauge("kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.").labels(
            model
        )
        self._queue_seconds = histogram(
            "request_queue_time_seconds",
            "Time from arrival to the first step.",
            _doubling(0.0005, 18),
        ).labels(model)
        self._prefill_seconds = histogram(
            "request_prefill_time_seconds",
            "Time from the first step to the first token.",
            _doubling(0.001, 16),
        ).labels(model)

    def _labels(self, drafter: Drafter) -> tuple[str, str, str, str]:
        hello = drafter.hello
        return self._model_name, drafter.id, hello.family, hello.placement.kind

    def _add(self, counter: Counter, labels: tuple[str, ...], amount: float = 1.0) -> None:
        """Note an increment of a counter; the next `flush` adds it to the counter.

        Locking a Prometheus counter and finding its labels takes longer than all other counting of
        a step.
        """
        key = (counter, labels)
        self._pending[key] = self._pending.get(key, 0.0) + amount

    def flush(self) -> None:
        """Export all counts gathered since the last call."""
        self._add_draft_counts()
        self._generated.inc(self._generated_count)
        self._generated_count = 0
        for reason, count in self._pauses.items():
            self._paused_steps.labels(self._model_name, reason.label).inc(count)
        self._pauses.clear()
        pending = self._pending
        self._pending = {}
        for (counter, labels), amount in pending.items():
            counter.labels(*labels).inc(amount)
        for drafter, answers in self._answers.items():
            histogram = self._of_drafts.draft_seconds.labels(*self._labels(drafter))
            for seconds in answers:
                histogram.observe(seconds)
        self._answers.clear()

    def joined(self, drafter: Drafter) -> None:
        """Record a drafter that joined; keep counts of its last `_VERSIONS` versions of weights."""
        named = self._labels(drafter)
        if self._joined.setdefault(drafter.id, named) != named:
            # A drafter that names another family on every stream must not add series each time.
            self.forget(drafter.id)
            self._joined[drafter.id] = named
        # The gauge may be 1 from an earlier stream, which ended while the acceptance was low.
        self.acceptance_fell(drafter, drafter.acceptance_watch.fell)
        if not (version := drafter.hello.weights_version):
            return
        versions = self._of_weights.versions.setdefault(drafter.id, [])
        if version in versions:
            versions.remove(version)
        versions.append(version)
        if len(versions) > _VERSIONS:
            self.flush()
            labels = {"drafter": drafter.id, "weights_version": versions.pop(0)}
            self._of_weights.draft_tokens.remove_by_labels(labels)
            self._of_weights.accepted_tokens.remove_by_labels(labels)

    def forget(self, drafter_id: str) -> None:
        """Drop the metrics of a drafter that will not come back, or that changed its labels."""
        self.flush()
        self._joined.pop(drafter_id, None)
        self._of_weights.versions.pop(drafter_id, None)
        for metric in self._registry.by_drafter:
            metric.remove_by_labels({"drafter": drafter_id})

    def _add_draft_counts(self) -> None:
        """Add to the counters what `walked` and `verified` gathered."""
        for (drafter, result), (count, wasted) in self._walks.items():
            self._add(self._of_drafts.hits, (*self._labels(drafter), result.value), count)
            self._add(self._of_drafts.wasted_tokens, self._labels(drafter), wasted)
        for (drafter, drafted, accepted, emitted), count in self._verified.items():
            self._add_shape("chain", count, drafted, emitted)
            self._add_branch("main", count * accepted)
            labels = self._labels(drafter)
            self._add(self._of_drafts.drafts, labels, count)
            self._add_tokens(drafter, count * drafted, count * accepted)
            for position in range(min(accepted, MAX_DRAFT_TOKENS)):
                self._add(self._of_drafts.accepted_per_pos, (*labels, _POSITIONS[position]), count)
        self._walks.clear()
        self._verified.clear()

    def _add_tokens(self, drafter: Drafter, drafted: int, accepted: int) -> None:
        """Add verified tokens of a drafter; `accepted` of the `drafted` tokens were accepted."""
        labels = self._labels(drafter)
        self._add(self._of_drafts.draft_tokens, labels, drafted)
        self._add(self._of_drafts.accepted_tokens, labels, accepted)
        if version := drafter.hello.weights_version:
            versioned = (self._model_name, drafter.id, version)
            self._add(self._of_weights.draft_tokens, versioned, drafted)
            self._add(self._of_weights.accepted_tokens, versioned, accepted)

    def _add_shape(self, shape: str, count: int, drafted: int, emitted: int) -> None:
        """Add `count` drafts of a shape.

        Each draft has `drafted` tokens, and its step committed `emitted` tokens to the sequence.
        """
        labels = (self._model_name, shape)
        self._add(self._of_shapes.drafts, labels, count)
        self._add(self._of_shapes.draft_tokens, labels, count * drafted)
        self._add(self._of_shapes.emitted_tokens, labels, count * emitted)

    def _add_branch(self, branch: str, accepted: int) -> None:
        """Add `accepted` tokens; `branch` says whether they are on the main path or beside it."""
        self._add(self._of_shapes.accepted_tokens_by_branch, (self._model_name, branch), accepted)

    def received(self, drafter: Drafter, byte_count: int) -> None:
        """Record the bytes of a message of a draft stream."""
        self._add(self._of_drafts.received, self._labels(drafter), byte_count)

    def ignored(self, drafter: Drafter) -> None:
        """Record a message of a draft stream whose kind this version does not know."""
        self._add(self._of_drafts.ignored, self._labels(drafter))

    def answered(self, drafter: Drafter, seconds: list[float]) -> None:
        """Record a drafter's first answers to verdicts; `seconds` has the time that each took."""
        self._answers.setdefault(drafter, []).extend(seconds)

    def proposed(
        self, drafter: Drafter, token_count: int, stale_count: int, cut_count: int
    ) -> None:
        """Record how many tokens the proposals had, and how many of them were stale or cut."""
        labels = self._labels(drafter)
        self._add(self._of_drafts.proposed_tokens, labels, token_count)
        self._add(self._of_drafts.stale_tokens, labels, stale_count)
        if cut_count:
            self._add(self._of_drafts.cut_tokens, labels, cut_count)

    def walked(self, drafter: Drafter, walk: CommitWalk) -> None:
        """Record that a trie's root moved along a commit."""
        key = (drafter, walk.result)
        count, wasted = self._walks.get(key, (0, 0))
        self._walks[key] = (count + 1, wasted + walk.wasted)

    def verified(self, drafter: Drafter, drafted: int, accepted: int, emitted: int) -> None:
        """Record a verified chain of `drafted` tokens.

        `accepted` of them were accepted. The step committed `emitted` tokens to the sequence.
        """
        key = (drafter, drafted, accepted, emitted)
        self._verified[key] = self._verified.get(key, 0) + 1

    def verified_in_tree(
        self, drafter: Drafter, drafted: int, places: list[int], *, leads: bool
    ) -> None:
        """Record a drafter's `drafted` tokens of a verified tree.

        `places` has, for each accepted token of the drafter, its index in the accepted path. The
        tree counts as a draft only of the drafter that `leads`: the drafter of the main path's
        first token.
        """
        labels = self._labels(drafter)
        if leads:
            self._add(self._of_drafts.drafts, labels)
        self._add_tokens(drafter, drafted, len(places))
        for place in places:
            self._add(self._of_drafts.accepted_per_pos, (*labels, _POSITIONS[place]))

    def verified_draft(
        self, drafted: int, on_main_path: int, accepted: int, emitted: int, *, branched: bool
    ) -> None:
        """Record a verified draft of several drafters, or with branches.

        `accepted` of its tokens were accepted; `on_main_path` of these are on the main path.
        """
        self._add_shape("tree" if branched else "chain", 1, drafted, emitted)
        self._add_branch("main", on_main_path)
        self._add_branch("side", accepted - on_main_path)

    def acceptance_fell(self, drafter: Drafter, fell: bool) -> None:
        """Export whether a drafter's acceptance has fallen."""
        self._of_drafts.acceptance_fell.labels(*self._labels(drafter)).set(fell)

    def drafting_paused(self, drafter: Drafter, paused: bool) -> None:
        """Export whether a drafter's drafting is paused."""
        self._of_drafts.drafting_paused.labels(*self._labels(drafter)).set(paused)

    def generated(self, token_count: int) -> None:
        """Record committed tokens."""
        self._generated_count += token_count

    def queued(self, seconds: float) -> None:
        """Record how long a sequence waited before its first step."""
        self._queue_seconds.observe(seconds)

    def prefilled(self, seconds: float) -> None:
        """Record the time from a sequence's first step to its first token."""
        self._prefill_seconds.observe(seconds)

    def integrity_failed(self) -> None:
        """Record that the check of the idle engine's page pool failed."""
        self._integrity_failures.inc()

    def step(self, times: StepTimes, isolated_forward_s: float, sequence_count: int) -> None:
        """Record an engine step.

        The step's forward takes `isolated_forward_s` on an idle machine. With 0, the step does not
        count in the times of decoding.
        """
        self._step_seconds.observe(times.step_s)
        self._batch.observe(sequence_count)
        self._phase_seconds["wait"].inc(times.wait_s)
        for phase, seconds in times.phases_s.items():
            self._phase_seconds[phase].inc(seconds)
        if isolated_forward_s > 0.0:
            self._decode_seconds.inc(times.wait_s + times.step_s)
            self._isolated_seconds.inc(isolated_forward_s)

    def graphs(self, count: int, memory_bytes: int) -> None:
        """Record the CUDA graphs that were captured at start."""
        self._graphs.set(count)
        self._graph_memory.set(memory_bytes)

    def paused(self, reason: PauseReason, count: int) -> None:
        """Count `count` sequences that had no draft in a step, for this reason."""
        self._pauses[reason] = self._pauses.get(reason, 0) + count

    def occupancy(self, now: Occupancy) -> None:
        """Record the sequences and pages in use, and the scheduler's counts."""
        self._running.set(now.running)
        self._waiting.set(now.waiting)
        self._unread.set(now.unread)
        self._pages.set(now.pages)
        before = self._exported
        self._prefix_queries.inc(now.prompt_tokens - before.prompt_tokens)
        self._prefix_hits.inc(now.cached_tokens - before.cached_tokens)
        self._preemptions.inc(now.preemptions - before.preemptions)
        self._exported = now
