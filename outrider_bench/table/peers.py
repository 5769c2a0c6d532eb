"""vLLM's and `transformers`' own ways of drafting, as further rows of the table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from outrider_bench import vllm_ways
from outrider_bench.experiment.traffic import Encoder, Request
from outrider_bench.sample import Sample
from outrider_bench.settings import TableSettings
from outrider_bench.table.rows import Answer
from outrider_bench.table.ways import MOST_AT_ONCE, Ask, Way, has_model

# As in vLLM's examples of speculative decoding.
_VLLM_DRAFT_TOKENS = 4


async def started(
    settings: TableSettings, target: Path, encoder: Encoder, running: AsyncExitStack
) -> list[Way]:
    """Start the programs that the settings name, each in processes of its own.

    Raises RuntimeError with its last words if one does not start.
    """
    found = []
    if settings.vllm is not None:
        for name, speculative in _vllm_methods(settings).items():
            if settings.asks(name):
                flags = ["--dtype", "auto", "--max-sequences", str(MOST_AT_ONCE)]
                if speculative:
                    flags += ["--count-drafts", "--speculative", json.dumps(speculative)]
                process = vllm_ways.process(settings.vllm, target, flags)
                ask = await running.enter_async_context(process)
                found.append(Way(name, _vllm(ask, encoder)))
    if settings.transformers:
        command = [sys.executable, "-m", "outrider_bench.transformers_peer", str(target)]
        hows = {"transformers": "plain", "transformers, prompt lookup": "lookup"}
        if has_model(settings.draft):
            command += ["--draft", str(settings.draft)]
            hows["transformers, assisted"] = "assisted"
        ask = await running.enter_async_context(vllm_ways.line_peer(*command))
        found += [
            Way(name, _transformers(ask, how, encoder), grammars="none", most=1)
            for name, how in hows.items()
            if settings.asks(name)
        ]
    return found


def _vllm_methods(settings: TableSettings) -> dict[str, dict[str, Any]]:
    """vLLM's `speculative_config` by the name of the way, without a drafter that is missing."""
    count = {"num_speculative_tokens": _VLLM_DRAFT_TOKENS}
    lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    found: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm, ngram": {"method": "ngram", **lookup, **count},
    }
    if has_model(settings.eagle3):
        found["vllm, eagle3"] = {"method": "eagle3", "model": str(settings.eagle3), **count}
    if has_model(settings.draft):
        model = {"method": "draft_model", "model": str(settings.draft)}
        found["vllm, draft model"] = model | count
    return found


def _vllm(process: vllm_ways.Ask, encoder: Encoder) -> Ask:
    async def ask(requests: Sequence[Request], temperature: float, _: str) -> Answer:
        task = {
            "prompts": [request.prompt for request in requests],
            "batch": len(requests),
            "lengths": [request.output_tokens for request in requests],
            "seeds": [request.seed for request in requests],
            "grammars": [request.grammar for request in requests],
            "temperature": temperature,
            "ignore_eos": False,
        }
        answer = await process(task)
        sample = Sample(**answer["sample"])
        return Answer(sample, sample.counters, _texts(answer, encoder))

    return ask


def _transformers(process: vllm_ways.Ask, how: str, encoder: Encoder) -> Ask:
    async def ask(requests: Sequence[Request], temperature: float, _: str) -> Answer:
        [request] = requests
        task = {
            "how": how,
            "prompt": request.prompt,
            "length": request.output_tokens,
            "temperature": temperature,
            "seed": request.seed,
        }
        answer = await process(task)
        sample = Sample(answer["tokens"], answer["seconds"])
        return Answer(sample, {}, _texts(answer, encoder), forwards=answer["forwards"])

    return ask


def _texts(answer: dict[str, Any], encoder: Encoder) -> tuple[str, ...]:
    return tuple(encoder.text(ids) for ids in answer["output_ids"])
