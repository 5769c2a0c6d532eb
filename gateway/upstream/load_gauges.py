"""Exports the load of a model's verifiers under vLLM's names.

Autoscalers, and pickers that choose a server for each request, expect these gauges where OpenAI's
API is served: at the gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.upstream.routing import Router
from outrider.protocol.model_info import Load


def _usage(loads: Sequence[Load]) -> float:
    return sum(load.kv_cache_usage for load in loads) / len(loads)


_GAUGES: dict[str, tuple[str, Callable[[Sequence[Load]], float]]] = {
    "num_requests_running": (
        "Sequences in the verifiers' batches.",
        lambda loads: sum(load.running for load in loads),
    ),
    "num_requests_waiting": (
        "Sequences in the verifiers' queues.",
        lambda loads: sum(load.waiting for load in loads),
    ),
    "kv_cache_usage_perc": ("Share of the KV pages in use, 0 to 1.", _usage),
    # vLLM's earlier name of this gauge, which some routers still read.
    "gpu_cache_usage_perc": ("Share of the KV pages in use, 0 to 1.", _usage),
}


class LoadGauges(Collector):
    """Makes the gauges for each scrape from the last polls of verifiers that take requests."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield each gauge, with a value for each model."""
        loads: dict[str, list[Load]] = {}
        for model, info, _ in self._router.ready_picks():
            if info.load is not None:
                loads.setdefault(model, []).append(info.load)
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
            for model, of_model in loads.items():
                gauge.add_metric([model], value(of_model))
            yield gauge
