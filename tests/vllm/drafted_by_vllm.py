"""Writes greedy texts with vLLM and a head.

    python -m tests.vllm.drafted_by_vllm TARGET HEAD DRAFTS < prompts.json

The program has a process of its own, since vLLM's imports warn and vLLM prints. Its answer is JSON:
`texts`, and `rounds`, how many drafts vLLM verified for all texts.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Write a text of `tokens` tokens for each of `prompts`."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    asked = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        json.dump(_texts(asked, *sys.argv[1:]), answer)


def _texts(asked: dict[str, Any], target: str, head: str, drafts: str) -> dict[str, Any]:
    import vllm

    model = vllm.LLM(
        target,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": head,
            "num_speculative_tokens": int(drafts),
        },
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=asked["tokens"], detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    texts = [list(each.outputs[0].token_ids) for each in model.generate(prompts, params)]
    [rounds] = [
        metric.value
        for metric in model.get_metrics()
        if metric.name == "vllm:spec_decode_num_drafts"
    ]
    return {"texts": texts, "rounds": rounds}


if __name__ == "__main__":
    main()
