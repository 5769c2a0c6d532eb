"""Prepares vLLM's two runners to verify the drafts that our scheduler gives them.

vLLM verifies drafts only beside a drafter of its own. If this drafter is a head or a draft model,
its guesses go to the scheduler, see `own_drafter`. Otherwise each runner gets a drafter that never
drafts. The first runner takes the drafter's class by name. The second runner has a closed list of
drafters, so `install`, a general plugin of vLLM, replaces the n-gram drafter by ours. `install`
also hands the scheduler's drafts to the second runner, which would otherwise look only at its own
drafter's drafts. Both runners keep the hidden states that our drafters read, see `features`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import invalid
from verifier_svc.vllm.versions import check_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCHEDULER = "verifier_svc.vllm.scheduler.OutriderScheduler"
OWN_DRAFTERS = ("draft_model", "dflash", "dspark", "eagle", "eagle3", "mtp")
"""The methods, in vLLM's configuration, of vLLM's own drafters whose guesses we take as drafts."""
_MARK = "outrider_wraps"


def uses_v2() -> bool:
    """Return whether vLLM takes its second runner where both runners can serve a configuration."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    wanted = envs.VLLM_USE_V2_MODEL_RUNNER
    return bool(HAS_TRITON if wanted is None else wanted)


def engine_arguments(
    draft_tokens: int, *, v2: bool, own_drafter: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return vLLM's arguments for drafts of at most `draft_tokens`.

    With `v2` they are for vLLM's second runner, otherwise for its first. `own_drafter` is the
    configuration of a drafter of vLLM's; without it, vLLM drafts nothing.
    """
    drafter: dict[str, Any] = {"method": "custom_class", "model": f"{__name__}.NoProposer"}
    arguments: dict[str, Any] = {"scheduler_cls": SCHEDULER}
    if v2:
        # vLLM requires these numbers for an n-gram lookup. They have no effect, since `install`
        # replaces vLLM's lookup.
        drafter = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 2}
        arguments["logits_processors"] = ["verifier_svc.vllm.noise:CoupledNoise"]
    if own_drafter is not None:
        drafter = dict(own_drafter)
        arguments["async_scheduling"] = False
    drafter.setdefault("num_speculative_tokens", draft_tokens)
    return {**arguments, "speculative_config": drafter}


def own_method(vllm_config: VllmConfig) -> str | None:
    """Return the method of vLLM's own drafter; None if our stub takes its place.

    Raises OutriderError(INVALID_VALUE) if Outrider's drafters cannot draft for this configuration.
    """
    speculation = vllm_config.speculative_config
    stub = "ngram" if vllm_config.use_v2_model_runner else "custom_class"
    found = getattr(speculation, "method", None)
    if found == stub:
        return None
    if speculation is None or found not in OWN_DRAFTERS:
        methods = ", ".join((stub, *OWN_DRAFTERS))
        raise invalid("speculative_config", f"needs one of the methods {methods}, not {found}")
    if vllm_config.scheduler_config.async_scheduling:
        message = "must be off: only then does the scheduler get the drafts of vLLM's own drafter"
        raise invalid("async_scheduling", message)
    if speculation.draft_sample_method != "greedy":
        message = "needs the draft_sample_method greedy, since another drafter's draft may be taken"
        raise invalid("speculative_config", message)
    return str(found)


def is_ours(vllm_config: VllmConfig) -> bool:
    """Return whether the class of an engine's scheduler has the name of our scheduler."""
    scheduler = vllm_config.scheduler_config.scheduler_cls
    name = scheduler if isinstance(scheduler, str) else getattr(scheduler, "__qualname__", "")
    return name.rpartition(".")[2] == SCHEDULER.rpartition(".")[2]


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Wrap a function of vLLM's, once."""
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        wrapped = wrap(original)
        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)


# --- both runners ---


def install() -> None:
    """Let the runners take our drafts; for the entry point group `vllm.general_plugins`.

    Without effect on engines that have another scheduler.
    """
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _replace(WorkerWrapperBase, "init_device", _with_preparation)


def _with_preparation(init_device: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `init_device` that prepares the runner's class before it makes the runner."""

    @wraps(init_device)
    def prepare_and_init(worker: Any) -> Any:
        if is_ours(worker.vllm_config):
            prepare(worker.vllm_config)
        return init_device(worker)

    return prepare_and_init


def prepare(vllm_config: VllmConfig) -> None:
    """Wrap the methods of an engine's runner, in this process.

    Raises OutriderError(INVALID_VALUE) for an unknown version of vLLM, and as `own_method` does.
    """
    import vllm

    check_version(vllm.__version__)
    method = own_method(vllm_config)
    if vllm_config.use_v2_model_runner:
        _prepare_v2(method)
    else:
        _prepare_v1()


def _with_offer(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that loads a model, and then offers its states to a scheduler of ours."""

    @wraps(load)
    def load_and_offer(runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(runner, *args, **kwargs)
        config = runner.vllm_config
        # A worker in another process must not read the settings, and a fast prefill computes no
        # states of most prompt tokens. So neither offers states.
        is_here = config.parallel_config.distributed_executor_backend == "uni"
        if is_ours(config) and is_here and not config.cache_config.kv_sharing_fast_prefill:
            from verifier_svc.vllm import features, plugin

            features.offer(runner, plugin.settings_for(config))
        return result

    return load_and_offer


def _with_states(execute_model: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `execute_model` that keeps the states that drafters read."""

    @wraps(execute_model)
    def execute(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        states = getattr(runner, "outrider_states", None)
        if states is None or kwargs.get("dummy_run"):
            return execute_model(runner, scheduler_output, *args, **kwargs)
        watched = states.begin()
        result = execute_model(runner, scheduler_output, *args, **kwargs)
        states.end(watched, scheduler_output.num_scheduled_tokens)
        return result

    return execute


# --- the first runner ---


def _prepare_v1() -> None:
    """Wrap the methods of the first runner."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _replace(GPUModelRunner, "_sample", _with_noise)
    # This method is the last part of loading a model, on a GPU and on a CPU.
    _replace(GPUModelRunner, "_setup_eagle3_aux_hidden_state_outputs", _with_offer)
    _replace(GPUModelRunner, "execute_model", _with_states)
    if current_platform.is_cpu():
        from vllm.triton_utils.dispatcher import register_kernels

        register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})


class NoProposer:
    """The first runner's drafter: drafts nothing."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Prepare the runner, in a process without our plugin too. Raises as `prepare` does."""
        prepare(vllm_config)

    def load_model(self, model: object) -> None:
        """Load nothing; the runner asks for it."""

    def propose(
        self, sampled_token_ids: Sequence[object], *args: object, **kwargs: object
    ) -> list[list[int]]:
        """Return an empty draft for each request."""
        return [[] for _ in sampled_token_ids]


def _with_noise(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_sample` that draws with our noise if the scheduler is ours."""
    from verifier_svc.vllm.noise import V1Noise

    @wraps(sample)
    def _sample(runner: Any, logits: torch.Tensor, metadata: Any) -> Any:
        if not is_ours(runner.vllm_config):
            return sample(runner, logits, metadata)
        if metadata is not None and not any(metadata.num_draft_tokens):
            metadata = None  # without it vLLM samples plainly, which takes less time
        noise = getattr(runner, "outrider_noise", None)
        if noise is None:
            noise = runner.outrider_noise = V1Noise(runner)
        noise.draw(logits, metadata)
        try:
            return sample(runner, logits, metadata)
        finally:
            noise.clear()

    return _sample


def _expand(
    output_ptr: torch.Tensor,
    input_ptr: torch.Tensor,
    cu_num_tokens_ptr: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: object = None,
) -> None:
    """Repeat each request's number for its draft tokens.

    In vLLM 0.32 and 0.33, vLLM's own function for CPUs writes to a copy, so that temperature, top-k
    and top-p of draft rows are whatever was in memory.
    """
    replaced = torch.where(input_ptr == replace_from, replace_to, input_ptr)
    counts = torch.diff(cu_num_tokens_ptr, prepend=cu_num_tokens_ptr.new_zeros(1)).long()
    output_ptr.copy_(torch.repeat_interleave(replaced, counts))


# --- the second runner ---


def _prepare_v2(method: str | None) -> None:
    """Wrap the methods of the second runner; `method` is that of vLLM's own drafter."""
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

    _replace(model_runner, "init_speculator", _with_ours)
    _replace(model_runner.GPUModelRunner, "prepare_inputs", _with_drafts)
    _replace(model_runner.GPUModelRunner, "load_model", _with_offer)
    _replace(model_runner.GPUModelRunner, "execute_model", _with_states)
    if method is not None:
        _replace(DraftTokensHandler, "set_draft_tokens", _with_copy)


def _with_ours(init_speculator: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `init_speculator` that makes our stub in place of vLLM's n-gram drafter."""

    @wraps(init_speculator)
    def choose(vllm_config: VllmConfig, device: torch.device, req_states: Any) -> Any:
        if is_ours(vllm_config) and own_method(vllm_config) is None:
            return NoSpeculator(vllm_config, device)
        return init_speculator(vllm_config, device, req_states)

    return choose


def _with_copy(set_draft_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that copies every step's guesses to the host, for the scheduler.

    vLLM copies them only for a batch with a grammar.
    """

    @wraps(set_draft_tokens)
    def set_and_copy(handler: Any, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        batch = copy(input_batch)
        batch.has_structured_output_reqs = True
        set_draft_tokens(handler, batch, draft_tokens)

    return set_and_copy


class NoSpeculator:
    """The second runner's drafter: drafts nothing. It has what the runner asks of a drafter."""

    num_query_per_req = 1
    num_extra_query_per_req = 0
    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        rows = vllm_config.scheduler_config.max_num_seqs
        columns = vllm_config.speculative_config.num_speculative_tokens
        self._nothing = torch.zeros(rows, columns, dtype=torch.int64, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: object) -> None:
        """Prepare nothing."""

    def capture(self) -> None:
        """Capture nothing."""

    def propose(self, input_batch: Any, *args: object, **kwargs: object) -> torch.Tensor:
        """Return tokens int64 [requests, draft tokens], which no step verifies."""
        return self._nothing[: input_batch.num_reqs]


def _with_drafts(prepare_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `prepare_inputs` that takes the scheduler's drafts, if the scheduler is ours."""
    from verifier_svc.vllm.noise import CoupledNoise

    @wraps(prepare_inputs)
    def prepare(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if is_ours(runner.vllm_config):
            _take_drafts(runner.req_states, scheduler_output.scheduled_spec_decode_tokens)
            for processor in runner.sampler.logits_processors if runner.sampler else ():
                if isinstance(processor, CoupledNoise):
                    processor.begin_step(scheduler_output, runner.req_states.req_id_to_index)
        return prepare_inputs(runner, scheduler_output, *args, **kwargs)

    return prepare


def _take_drafts(req_states: Any, drafts: dict[str, list[int]]) -> None:
    """Write the scheduler's drafts, in one copy, where the runner looks for its own drafter's."""
    from vllm.utils.torch_utils import async_tensor_h2d

    table = req_states.draft_tokens
    width = table.shape[1]
    rows: list[list[int]] = []
    for request_id, tokens in drafts.items():
        if tokens[0] >= 0:  # otherwise it is a padded row
            place = req_states.req_id_to_index[request_id]
            rows.append([place, *tokens, *[0] * (width - len(tokens))])
    if rows:
        sent = async_tensor_h2d(rows, dtype=torch.int64, device=table.device)
        table[sent[:, 0]] = sent[:, 1:]
