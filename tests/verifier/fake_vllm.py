"""The few classes of vLLM that our modules extend or use, and a small scheduler.

The classes have the attributes of vLLM 0.32 that `verifier_svc/vllm` reads. `tests/vllm` runs the
same modules with vLLM itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

BLOCK = 4
PADDED = -1


class SamplingParams(SimpleNamespace):
    """Keeps a request's parameters as they were given, without vLLM's checks."""


class Request:
    """A request in the scheduler; forwards have read its first `num_computed_tokens` tokens."""

    def __init__(
        self, name: str, prompt: list[int], parameters: SamplingParams, salt: str | None = None
    ) -> None:
        self.request_id = name
        self.prompt_token_ids: list[int] | None = prompt
        self.sampling_params = parameters
        self.max_tokens = parameters.max_tokens
        self.cache_salt = salt
        self.output_token_ids: list[int] = []
        self.spec_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.is_prefill_chunk = False
        self.num_in_flight_tokens = 0
        self.num_output_placeholders = 0
        self.finish_reason: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids or ()) + self.num_output_tokens

    def is_finished(self) -> bool:
        return self.finish_reason is not None


class Scheduler:
    """Runs all requests at once; a test preempts and aborts them."""

    def __init__(
        self,
        blocks: int = 64,
        *,
        method: str = "custom_class",
        draft_sample_method: str = "greedy",
        async_scheduling: bool = False,
        num_lookahead_tokens: int = 0,
        **parallel: int,
    ) -> None:
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(**{"pipeline_parallel_size": 1, **parallel}),
            scheduler_config=SimpleNamespace(async_scheduling=async_scheduling),
            use_v2_model_runner=False,
            speculative_config=SimpleNamespace(
                method=method, draft_sample_method=draft_sample_method
            ),
        )
        self.num_lookahead_tokens = num_lookahead_tokens
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[0])
        self.block_size = BLOCK
        self.blocks = blocks
        self.max_num_scheduled_tokens = 64
        self.num_spec_tokens = 4
        self.max_model_len = 100
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        pool = SimpleNamespace(get_num_free_blocks=self.free_blocks)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool, usage=0.0)
        self.structured_output_manager = SimpleNamespace(validate_tokens=lambda _, tokens: tokens)

    def free_blocks(self) -> int:
        held = sum(-(-each.num_computed_tokens // BLOCK) for each in self.running)
        return self.blocks - held

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, name: str) -> None:
        """Abort a request."""
        self._end(self.requests[name], "abort")

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self._free_request(request)

    def _free_request(self, request: Request) -> None:
        del self.requests[request.request_id]

    def preempt(self, name: str) -> None:
        """Preempt a request: it loses its pages."""
        request = self.requests[name]
        self.running.remove(request)
        self._preempt_request(request, 0.0)

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        self.waiting.append(request)

    def schedule(self) -> Any:
        self.running += self.waiting
        self.waiting.clear()
        counts, drafts = {}, {}
        for each in self.running:
            counts[each.request_id] = each.num_tokens - each.num_computed_tokens
            if each.spec_token_ids:
                drafts[each.request_id] = each.spec_token_ids
                counts[each.request_id] += len(each.spec_token_ids)
                each.spec_token_ids = []
            each.num_computed_tokens += counts[each.request_id]
        return SimpleNamespace(num_scheduled_tokens=counts, scheduled_spec_decode_tokens=drafts)

    def update_from_output(self, scheduled: Any, sampled: dict[str, list[int]]) -> Any:
        """Append the tokens of each request, and end it at `max_tokens`."""
        for name in scheduled.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None:
                continue
            request.output_token_ids += sampled[name]
            request.num_computed_tokens = request.num_tokens - 1
            if request.num_output_tokens >= request.max_tokens:
                self._end(request, "length")
        return sampled


class LogitsProcessor:
    """vLLM's base class of logits processors."""


@contextmanager
def installed() -> Iterator[None]:
    """Let our modules import these classes; afterwards remove our modules and the classes."""
    before = set(sys.modules)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": SamplingParams, "__version__": "0.32.0"},
        "vllm.model_executor.models.interfaces": {
            "supports_eagle3": lambda model: model.supports_eagle3
        },
        "vllm.sampling_params": {
            "RequestOutputKind": SimpleNamespace(DELTA="delta"),
            "StructuredOutputsParams": SimpleNamespace,
        },
        "vllm.exceptions": {"VLLMClientError": type("VLLMClientError", (Exception,), {})},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.worker.gpu.sample.logits_processor.interface": {
            "LogitsProcessor": LogitsProcessor
        },
    }
    for name, content in contents.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        vars(sys.modules[name]).update(content)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.startswith(("vllm", "verifier_svc.vllm.scheduler", "verifier_svc.vllm.noise")):
                del sys.modules[name]
