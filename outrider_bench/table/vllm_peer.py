"""`python outrider_bench/table/vllm_peer.py`: vLLM in its own virtual environment and process.

The process says "ready" and answers each JSON line with a JSON line. In: {"prompts": [[ids]],
"batch": n, "lengths": [n]}, and optionally {"temperature": x, "seeds": [n], "grammars":
[structured_outputs or null], "ignore_eos": true}. Out: {"sample": the fields of
`outrider_bench.sample.Sample`, "output_ids": [[ids]]}. The process keeps `batch` requests in
progress: when a request ends, the next begins. The process imports Outrider only with `--drafts`:
vLLM then runs Outrider's scheduler, which takes drafts from drafters that dial
OUTRIDER_VERIFIER_LISTEN.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Serve until the end of input.

    Answers go to the original standard output. vLLM's own prints go to standard error.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--max-sequences", type=int, required=True)
    parser.add_argument("--speculative", help="JSON of vLLM's speculative_config")
    parser.add_argument("--count-drafts", action="store_true", help="return counters of drafts")
    parser.add_argument("--drafts", type=int, help="draft tokens of Outrider's drafters")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    vllm: Any = importlib.import_module("vllm")
    speculative = json.loads(arguments.speculative) if arguments.speculative else None
    ours: dict[str, Any] = {"speculative_config": speculative}
    if arguments.drafts:
        runner: Any = importlib.import_module("verifier_svc.vllm.runner")
        ours = runner.engine_arguments(arguments.drafts, v2=runner.uses_v2())
    llm = vllm.LLM(
        arguments.target,
        dtype=arguments.dtype,
        max_model_len=2048,
        max_num_seqs=arguments.max_sequences,
        # vLLM warms up with a forward of this size; at its default size this takes minutes.
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        disable_log_stats=not arguments.count_drafts,
        **ours,
    )
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        before = _drafts(llm) if arguments.count_drafts else {}
        answer = _run(vllm, llm.llm_engine, json.loads(line))
        after = _drafts(llm) if arguments.count_drafts else {}
        counters = {name: value - before.get(name, 0.0) for name, value in after.items()}
        answer["sample"]["counters"] = counters
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _drafts(llm: Any) -> dict[str, float]:
    """Return vLLM's counters of drafts so far, under the keys of `sample.counter_keys`."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num_"):
            name = metric.name.removeprefix("vllm:")
            for position, value in enumerate(getattr(metric, "values", ())):
                found[f"{name}.{position}"] = float(value)
            if hasattr(metric, "value"):
                found[name] = float(metric.value)
    return found


def _params(vllm: Any, task: dict[str, Any], number: int) -> Any:
    """Return vLLM's sampling parameters of a task's request."""
    grammar = (task.get("grammars") or {number: None})[number]
    if grammar is not None:
        outputs: Any = importlib.import_module("vllm.sampling_params").StructuredOutputsParams
        # vLLM takes a structural tag as JSON text.
        grammar = outputs(**{k: json.dumps(v) for k, v in grammar.items()})
    return vllm.SamplingParams(
        max_tokens=task["lengths"][number],
        temperature=task.get("temperature", 0.0),
        seed=(task.get("seeds") or {number: None})[number],
        ignore_eos=task.get("ignore_eos", True),
        structured_outputs=grammar,
        detokenize=False,
    )


def _run(vllm: Any, engine: Any, task: dict[str, Any]) -> dict[str, Any]:
    waiting = list(enumerate(task["prompts"]))
    begun: dict[str, float] = {}
    first: dict[str, float] = {}
    output_ids: dict[int, list[int]] = {}
    ttft, tpot = [], []
    started = time.perf_counter()
    while waiting or begun:
        while waiting and len(begun) < task["batch"]:
            number, prompt = waiting.pop(0)
            begun[str(number)] = time.perf_counter()
            params = _params(vllm, task, number)
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        for output in engine.step():
            now, count = time.perf_counter(), len(output.outputs[0].token_ids)
            if count and output.request_id not in first:
                first[output.request_id] = now
                ttft.append(now - begun[output.request_id])
            if output.finished:
                output_ids[int(output.request_id)] = list(output.outputs[0].token_ids)
                tpot.append((now - first[output.request_id]) / max(count - 1, 1))
                del begun[output.request_id]
    seconds = time.perf_counter() - started
    tokens = sum(map(len, output_ids.values()))
    sample = {"tokens": tokens, "seconds": seconds, "ttft": ttft, "tpot": tpot}
    return {"sample": sample, "output_ids": [ids for _, ids in sorted(output_ids.items())]}


if __name__ == "__main__":
    main()
