"""Writes the texts of cases with vLLM: `python -m tests.vllm.write_texts v1 < cases.json`.

The program has a process of its own, since a process has one runner, and vLLM's imports warn.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any


def main() -> None:
    """Write all texts once with each kind of draft."""
    v2 = sys.argv[1] == "v2"
    choose_runner(v2=v2)
    asked = json.load(sys.stdin)
    # What vLLM and its libraries print goes to standard error.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        json.dump(_texts(asked, v2), answer)


def choose_runner(*, v2: bool) -> None:
    """Let vLLM, which is not imported yet, run in this process with one of its runners."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
    }
    if v2:
        _interpret_triton()


def _interpret_triton() -> None:
    """Let Triton's interpreter run the second runner's kernels.

    vLLM also asks Triton for a backend for CPUs, so one is made up.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    driver = types.SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)


def _texts(asked: dict[str, Any], v2: bool) -> dict[str, Any]:
    import vllm

    from tests.vllm.cases import DRAFT_TOKENS, MODEL, Case, seed_of
    from tests.vllm.placed_drafts import OutriderScheduler
    from verifier_svc.vllm import runner
    from verifier_svc.vllm.parameters import vllm_parameters

    assert runner.uses_v2() == v2
    runner.install()
    arguments = runner.engine_arguments(DRAFT_TOKENS, v2=v2)
    arguments["scheduler_cls"] = "tests.vllm.placed_drafts.OutriderScheduler"
    engine = vllm.LLM(
        MODEL,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        block_size=32,
        enforce_eager=True,
        **asked.get("settings", {}),
        **arguments,
    ).llm_engine
    cases = [Case(**case) for case in asked["cases"]]
    sequences = [case.sequence(number, seed_of(number)) for number, case in enumerate(cases, 1)]
    OutriderScheduler.texts = {
        sequence.id: [*sequence.tokens, *text]
        for sequence, text in zip(sequences, asked["texts"], strict=True)
    }
    found = {}
    for kind in asked["kinds"]:
        OutriderScheduler.kind = kind
        OutriderScheduler.drafted = OutriderScheduler.accepted = OutriderScheduler.padded = 0
        for sequence in sequences:
            prompt = {"prompt_token_ids": list(sequence.tokens)}
            engine.add_request(str(sequence.id), prompt, vllm_parameters(sequence))
        texts: dict[str, list[int]] = {str(sequence.id): [] for sequence in sequences}
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts[output.request_id] += output.outputs[0].token_ids
        found[kind] = {
            "texts": list(texts.values()),
            "drafted": OutriderScheduler.drafted,
            "accepted": OutriderScheduler.accepted,
            "padded": OutriderScheduler.padded,
        }
    return found


if __name__ == "__main__":
    main()
