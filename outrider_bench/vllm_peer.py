"""`python outrider_bench/vllm_peer.py`: vLLM in its own virtual environment and process.

It says "ready" and answers each JSON line with one.
In: {"prompts": [[ids]], "batch": n, "lengths": [n]}.
Out: the fields of `outrider_bench.sample.Sample`.
`batch` requests are kept under way, a new one for each that ends. Imports Outrider only for
`--drafts`, which has vLLM's scheduler take drafts from drafters that dial
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
    engine = vllm.LLM(
        arguments.target,
        dtype=arguments.dtype,
        max_model_len=2048,
        max_num_seqs=arguments.max_sequences,
        # vLLM warms up with a forward of as many, for minutes by default. No load has more at once.
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **ours,
    ).llm_engine
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(_run(vllm, engine, json.loads(line))) + "\n")
        answers.flush()


def _run(vllm: Any, engine: Any, task: dict[str, Any]) -> dict[str, Any]:
    how = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    waiting = list(enumerate(task["prompts"]))
    begun: dict[str, float] = {}
    first: dict[str, float] = {}
    tokens, ttft, tpot = 0, [], []
    started = time.perf_counter()
    while waiting or begun:
        while waiting and len(begun) < task["batch"]:
            number, prompt = waiting.pop(0)
            begun[str(number)] = time.perf_counter()
            params = vllm.SamplingParams(max_tokens=task["lengths"][number], **how)
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        for output in engine.step():
            now, count = time.perf_counter(), len(output.outputs[0].token_ids)
            if count and output.request_id not in first:
                first[output.request_id] = now
                ttft.append(now - begun[output.request_id])
            if output.finished:
                tokens += count
                tpot.append((now - first[output.request_id]) / max(count - 1, 1))
                del begun[output.request_id]
    seconds = time.perf_counter() - started
    return {"tokens": tokens, "seconds": seconds, "ttft": ttft, "tpot": tpot}


if __name__ == "__main__":
    main()
