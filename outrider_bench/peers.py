"""`python -m outrider_bench.peers`: transformers' own generation in its own process.

It says "ready" and answers each JSON line with one.
In: {"way": "plain" | "prompt_lookup" | "assisted", "prompts": [[ids]], "batch": n,
"lengths": [n]}. Each answer has the mean of the lengths, since a batch ends as one.
Out: {"tokens": n, "seconds": s}.
Decoding is greedy. A batch is decoded to its end before the next begins, since `generate` offers
nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import mean
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Serve until end of input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--draft-tokens", type=int, required=True)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    target: Any = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype)
    draft: Any = AutoModelForCausalLM.from_pretrained(arguments.draft, dtype=dtype)
    target.to(device)
    draft.to(device)
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt_lookup": {"prompt_lookup_num_tokens": arguments.draft_tokens},
        "assisted": {"assistant_model": draft},
    }
    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        started = time.perf_counter()
        prompts = task["prompts"]
        batch = task["batch"]
        length = round(mean(task["lengths"]))
        limits = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
        how = {**limits, **ways[task["way"]]}
        waves = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        tokens = sum(_generate(target, wave, how, alone=task["way"] != "plain") for wave in waves)
        if device == "cuda":
            torch.cuda.synchronize()
        print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - started}), flush=True)


def _generate(target: Any, prompts: list[list[int]], how: dict[str, Any], *, alone: bool) -> int:
    """Generate, and return the number of tokens.

    Speculation in transformers takes one sequence at a time (`alone`). Plain decoding takes the
    batch, padded on the left.
    """
    batches = [prompts]
    if alone:
        batches = [[prompt] for prompt in prompts]
    count = 0
    for batch in batches:
        longest = max(map(len, batch))
        ids = torch.tensor(
            [[0] * (longest - len(prompt)) + prompt for prompt in batch], device=target.device
        )
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch],
            device=target.device,
        )
        with torch.inference_mode():
            out = target.generate(ids, attention_mask=mask, **how)
        count += (out.shape[1] - longest) * len(batch)
    return count


if __name__ == "__main__":
    main()
