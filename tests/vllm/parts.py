"""The parts of vLLM that our code uses, and a search for those that a version of vLLM lacks.

    python -m tests.vllm.parts FOLDER

FOLDER is the package `vllm` of some version, as an index's wheel has it. Only its sources are read,
so a version can be read without its libraries. The program names each part that has moved, and ends
with status 1 if one has.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Maps a file to its classes, and a class to what we use of it. The class "" has the names of the
# module. Names in brackets are the parameters that we give a function or that vLLM gives ours: the
# function's parameters must begin with them, and it may need no others. "()" checks only that no
# parameter is needed. A function without brackets is wrapped, whatever its parameters are.
PARTS: dict[str, dict[str, str]] = {
    "__init__.py": {"": "__version__ SamplingParams"},
    "config/__init__.py": {"": "VllmConfig"},
    "config/cache.py": {"CacheConfig": "kv_sharing_fast_prefill"},
    "config/model.py": {
        "ModelConfig": "model served_model_name max_model_len dtype get_vocab_size()"
        " get_hidden_size() get_total_num_hidden_layers()"
    },
    "config/parallel.py": {
        "ParallelConfig": "pipeline_parallel_size tensor_parallel_size data_parallel_index"
        " distributed_executor_backend"
    },
    "config/scheduler.py": {"SchedulerConfig": "max_num_seqs scheduler_cls async_scheduling"},
    "config/speculative.py": {
        "SpeculativeConfig": "method num_speculative_tokens draft_sample_method"
    },
    "config/vllm.py": {
        "VllmConfig": "instance_id additional_config use_v2_model_runner speculative_config"
        " model_config parallel_config scheduler_config cache_config device_config"
    },
    "engine/arg_utils.py": {
        "EngineArgs": "model dtype seed enable_prefix_caching max_num_seqs gpu_memory_utilization"
        " trust_remote_code tensor_parallel_size disable_log_stats structured_outputs_config"
        " max_num_batched_tokens scheduler_cls speculative_config logits_processors"
        " async_scheduling"
    },
    "envs.py": {"": "VLLM_USE_V2_MODEL_RUNNER VLLM_ENABLE_V1_MULTIPROCESSING"},
    "exceptions.py": {"": "VLLMClientError"},
    "model_executor/models/interfaces.py": {
        "": "supports_eagle3(model)",
        "SupportsEagle3": "set_aux_hidden_state_layers(layers)",
    },
    "outputs.py": {
        "RequestOutput": "request_id outputs finished num_cached_tokens prompt_logprobs",
        "CompletionOutput": "token_ids finish_reason logprobs",
    },
    "platforms/__init__.py": {"": "current_platform"},
    "platforms/interface.py": {"Platform": "is_cpu() get_device_uuid"},
    "sampling_params.py": {
        "RequestOutputKind": "DELTA",
        "StructuredOutputsParams": "grammar",
        "SamplingParams": "temperature max_tokens stop_token_ids ignore_eos logprobs"
        " prompt_logprobs structured_outputs detokenize output_kind extra_args",
    },
    "triton_utils/__init__.py": {"": "HAS_TRITON"},
    "triton_utils/dispatcher.py": {"": "register_kernels(overrides)"},
    "utils/torch_utils.py": {"": "async_tensor_h2d"},
    "v1/core/sched/output.py": {
        "SchedulerOutput": "num_scheduled_tokens scheduled_spec_decode_tokens"
        " scheduled_cached_reqs scheduled_new_reqs",
        "CachedRequestData": "req_ids num_computed_tokens",
        "NewRequestData": "req_id num_computed_tokens",
    },
    "v1/core/sched/scheduler.py": {
        "Scheduler": "add_request(request) _free_request _preempt_request schedule"
        " update_from_output(scheduler_output, model_runner_output)"
        " update_draft_token_ids(draft_token_ids) requests running waiting block_size"
        " max_model_len max_num_scheduled_tokens num_spec_tokens num_lookahead_tokens"
        " kv_cache_manager kv_cache_config"
        " structured_output_manager vllm_config",
    },
    "v1/core/block_pool.py": {"BlockPool": "get_num_free_blocks()"},
    "v1/core/kv_cache_manager.py": {"KVCacheManager": "block_pool usage"},
    "v1/engine/llm_engine.py": {
        "LLMEngine": "from_engine_args(engine_args) add_request(request_id, prompt, params)"
        " abort_request(request_ids) step() has_unfinished_requests() vllm_config",
    },
    "v1/kv_cache_interface.py": {"KVCacheConfig": "kv_cache_groups"},
    "v1/outputs.py": {"DraftTokenIds": "req_ids draft_token_ids", "ModelRunnerOutput": ""},
    "v1/request.py": {
        "Request": "request_id prompt_token_ids sampling_params cache_salt max_tokens"
        " spec_token_ids num_tokens num_computed_tokens num_output_tokens output_token_ids"
        " num_in_flight_tokens num_output_placeholders is_prefill_chunk is_finished()",
    },
    "v1/spec_decode/metadata.py": {
        "SpecDecodeMetadata": "num_draft_tokens bonus_logits_indices target_logits_indices"
    },
    "v1/structured_output/__init__.py": {
        "StructuredOutputManager": "validate_tokens(request, spec_tokens)"
    },
    "v1/worker/worker_base.py": {"WorkerWrapperBase": "init_device() vllm_config"},
    # The first runner.
    "v1/sample/rejection_sampler.py": {
        "": "expand_kernel",
        "RejectionSampler": "apply_logits_processors(logits, sampling_metadata, metadata)",
    },
    "v1/sample/sampler.py": {
        "Sampler": "apply_logits_processors(logits, sampling_metadata, predict_bonus_token)"
    },
    "v1/worker/gpu_input_batch.py": {
        "InputBatch": "req_ids spec_token_ids num_tokens_no_spec token_ids_cpu",
        "CachedRequestState": "sampling_params",
    },
    "v1/worker/gpu_model_runner.py": {
        "GPUModelRunner": "_sample(logits, spec_decode_metadata) execute_model get_model()"
        " _setup_eagle3_aux_hidden_state_outputs sampler rejection_sampler requests input_batch"
        " discard_request_mask use_aux_hidden_state_outputs execute_model_state drafter"
        " vllm_config device",
        "ExecuteModelState": "hidden_states aux_hidden_states",
    },
    # The second runner.
    "v1/worker/gpu/input_batch.py": {"InputBatch": "req_ids num_reqs has_structured_output_reqs"},
    "v1/worker/gpu/model_runner.py": {
        "": "init_speculator",
        "GPUModelRunner": "prepare_inputs load_model execute_model get_model() sampler req_states"
        " use_aux_hidden_state_outputs execute_model_state vllm_config device",
        "ExecuteModelState": "hidden_states aux_hidden_states input_batch",
    },
    "v1/worker/gpu/sample/sampler.py": {"Sampler": "logits_processors"},
    "v1/worker/gpu/sample/logits_processor/interface.py": {
        "LogitsProcessor": "add_request(req_idx, sampling_params) apply(logits, ctx)",
        "LogitsContext": "idx_mapping_np",
        "LogitsProcRequestState": "all_token_ids prefill_len",
    },
    "v1/worker/gpu/spec_decode/__init__.py": {
        "": "init_speculator(vllm_config, device, req_states)"
    },
    "v1/worker/gpu/spec_decode/utils.py": {
        "DraftTokensHandler": "set_draft_tokens(input_batch, draft_tokens)"
    },
    "v1/worker/gpu/states.py": {"RequestState": "draft_tokens req_id_to_index all_token_ids"},
}
# The attributes of a drafter that the second runner reads. Our drafter lacks those that the runner
# reads only of drafters with a model, with watermarks or with confidences.
RUNNER = "v1/worker/gpu/model_runner.py"
ASKED = {
    *("capture", "draft_logits", "init_cudagraph_manager", "num_extra_query_per_req"),
    *("num_query_per_req", "pcp_manager", "propose", "supports_mm_inputs"),
    *("attn_groups", "dcp_size", "draft_attn_layer_names", "draft_token_confidence_probs"),
    *("load_model", "model", "observe_verification", "prepare_watermarking", "set_attn"),
}


def moved(vllm: Path) -> Iterator[str]:
    """Yield a line for each part that the package in a folder lacks."""
    _text.cache_clear()
    _names.cache_clear()
    for file, classes in PARTS.items():
        for owner, names in classes.items():
            for name, brackets, given in re.findall(r"(\w+)(\(([^)]*)\))?", names):
                wanted = re.findall(r"\w+", given) if brackets else None
                yield from _missing(vllm, file, owner, name, wanted)
    asked = re.findall(r"self\.speculator\.(\w+)", _text(vllm / RUNNER))
    for name in sorted({*asked} - ASKED):
        yield f"{RUNNER}: the runner asks its drafter for {name}"


def _missing(
    vllm: Path, file: str, owner: str, name: str, wanted: list[str] | None
) -> Iterator[str]:
    path = vllm / file
    full = f"{owner}.{name}" if owner else name
    if not path.is_file():
        yield f"{file}: the file is missing, with {full}"
        return
    if owner and owner not in _names(path):
        yield f"{file}: {owner} is missing, with its {name}"
        return
    found = _members(vllm, path, owner) if owner else _names(path)
    if name not in found:
        yield f"{file}: {full} is missing"
        return
    node = found[name]
    if wanted is not None and isinstance(node, ast.FunctionDef):
        parameters, needed = _parameters(node, in_class=bool(owner))
        if parameters[: len(wanted)] != wanted or not needed <= {*wanted}:
            yield f"{file}: {full} takes ({', '.join(parameters)}), not ({', '.join(wanted)})"


def _parameters(function: ast.FunctionDef, *, in_class: bool) -> tuple[list[str], set[str]]:
    """Return a function's parameters in order, and those without a default value."""
    static = any(
        isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list
    )
    own = in_class and not static
    positional = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    needed = {*positional[own : len(positional) - len(function.args.defaults)]}
    keywords = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    needed |= {each.arg for each, default in keywords if default is None}
    return [*positional[own:], *(each.arg for each in function.args.kwonlyargs)], needed


@cache
def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


@cache
def _names(path: Path) -> dict[str, ast.AST]:
    """Return what a module defines or imports, in any branch of an `if` or a `try`."""
    return _defined(ast.parse(_text(path)).body)


def _defined(body: list[ast.stmt]) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(each.asname or each.name): node for each in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            leaves = [leaf for target in targets for leaf in ast.walk(target)]
            found |= {leaf.id: node for leaf in leaves if isinstance(leaf, ast.Name)}
        elif isinstance(node, ast.If | ast.Try):
            for block in (node.body, node.orelse, *(each.body for each in _handlers(node))):
                found |= {name: each for name, each in _defined(block).items() if name not in found}
    return found


def _handlers(node: ast.If | ast.Try) -> list[ast.ExceptHandler]:
    return node.handlers if isinstance(node, ast.Try) else []


def _members(vllm: Path, path: Path, owner: str) -> dict[str, ast.AST]:
    """Return the members of a class and of its bases, and what its methods set on `self`."""
    node = _names(path).get(owner)
    if isinstance(node, ast.ImportFrom):
        module = (node.module or "").removeprefix("vllm.").replace(".", "/")
        for file in (vllm / f"{module}.py", vllm / module / "__init__.py"):
            if file.is_file() and file != path:
                return _members(vllm, file, owner)
    if not isinstance(node, ast.ClassDef):
        return {}
    found: dict[str, ast.AST] = {}
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name):
            found |= _members(vllm, path, name.id)
    found |= {
        each.attr: each
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return found | _defined(node.body)


def main() -> None:
    """Print what has moved; end with status 1 if anything has."""
    lines = list(moved(Path(sys.argv[1])))
    print(*lines or ["every part is in its place"], sep="\n")
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
