"""The decoding modes of `transformers`, for `outrider lab table`.

`python -m outrider_bench.table.transformers_peer TARGET` says "ready" and answers each JSON
line with a JSON line.
In: {"how": "plain", "lookup" or "assisted", "prompt": [ids], "length": n, "temperature": x,
"seed": n}.
Out: {"tokens": n, "seconds": x, "forwards": n of the target, "output_ids": [[ids]]}.
`lookup` is prompt lookup, and `assisted` is assisted generation with the model of `--draft`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

# transformers' own documentation shows values from 3 to 10.
_LOOKUP_TOKENS = 8


def main() -> None:
    """Serve until the end of input. The library's prints go to standard error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--draft", help="directory of a draft model with the target's vocabulary")
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.target, dtype="auto")
    modes: dict[str, dict[str, Any]] = {
        "plain": {},
        "lookup": {"prompt_lookup_num_tokens": _LOOKUP_TOKENS},
    }
    if arguments.draft is not None:
        draft = AutoModelForCausalLM.from_pretrained(arguments.draft, dtype="auto")
        modes["assisted"] = {"assistant_model": draft}
    forwards = [0]

    def count(*_: Any) -> None:
        forwards[0] += 1

    model.register_forward_pre_hook(count)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        task = json.loads(line)
        forwards[0] = 0
        started = time.perf_counter()
        ids = _generate(model, task, modes[task["how"]])
        seconds = time.perf_counter() - started
        answer = {"tokens": len(ids), "seconds": seconds, "forwards": forwards[0]}
        answers.write(json.dumps(answer | {"output_ids": [ids]}) + "\n")
        answers.flush()


def _generate(model: Any, task: dict[str, Any], how: dict[str, Any]) -> list[int]:
    """Return the answer's ids, including the end token if it has one."""
    torch.manual_seed(task["seed"])
    prompt = torch.tensor([task["prompt"]])
    sampling: dict[str, Any] = {"do_sample": False}
    if task["temperature"] > 0.0:
        # The library's default would cut the distribution to 50 tokens.
        sampling = {"do_sample": True, "temperature": task["temperature"], "top_k": 0}
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=task["length"],
        **sampling,
        **how,
    )
    return [int(token) for token in generated[0, prompt.shape[1] :]]


if __name__ == "__main__":
    main()
