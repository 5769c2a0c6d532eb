"""Runs vLLM's and `transformers`' own drafting methods, for further rows of the table."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.process.network.ports import free_port
from outrider_bench.experiment.child import LOOPBACK, Launch, start
from outrider_bench.experiment.traffic import Encoder, Request
from outrider_bench.sample import Sample
from outrider_bench.settings import TableSettings
from outrider_bench.table import peer_process
from outrider_bench.table.modes import MOST_AT_ONCE, Ask, Mode, has_model
from outrider_bench.table.rows import Answer

# As in vLLM's examples of speculative decoding.
_VLLM_DRAFT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class _Method:
    """A drafting method in vLLM."""

    speculative: Mapping[str, Any] | None = None
    """vLLM's `speculative_config`."""
    drafter: Sequence[str] | None = None
    """None if vLLM runs its own scheduler. If it runs Outrider's scheduler, the flags of
    Outrider's drafter; empty if there is no drafter."""


async def started(
    settings: TableSettings, target: Path, encoder: Encoder, running: AsyncExitStack
) -> list[Mode]:
    """Start the programs that the settings name, in separate processes.

    Raises PeerDied with a program's last lines if it does not start.
    """
    found = []
    if settings.vllm is not None:
        for name, method in _vllm_methods(settings).items():
            if settings.asks(name):
                ask = await _start_vllm(settings.vllm, target, method, running)
                found.append(Mode(name, _vllm(ask, encoder)))
    if settings.transformers:
        command = [sys.executable, "-m", "outrider_bench.table.transformers_peer", str(target)]
        hows = {"transformers": "plain", "transformers, prompt lookup": "lookup"}
        if has_model(settings.draft):
            command += ["--draft", str(settings.draft)]
            hows["transformers, assisted"] = "assisted"
        ask = await running.enter_async_context(peer_process.line_peer(*command))
        found += [
            Mode(name, _transformers(ask, how, encoder), grammars="none", most=1)
            for name, how in hows.items()
            if settings.asks(name)
        ]
    return found


def _vllm_methods(settings: TableSettings) -> dict[str, _Method]:
    """Return vLLM's drafting methods for which no model is missing, keyed by decoding mode."""
    count = {"num_speculative_tokens": _VLLM_DRAFT_TOKENS}
    lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    found = {
        "vllm": _Method(),
        "vllm, ngram": _Method({"method": "ngram", **lookup, **count}),
        "vllm, our scheduler": _Method(drafter=()),
        "vllm, our ngram": _Method(drafter=("--family", "ngram")),
    }
    if has_model(settings.eagle3):
        head = {"method": "eagle3", "model": str(settings.eagle3)}
        found["vllm, eagle3"] = _Method(head | count)
    if has_model(settings.draft):
        model = {"method": "draft_model", "model": str(settings.draft)}
        found["vllm, draft model"] = _Method(model | count)
        ours = ("--family", "model", "--model", str(settings.draft), "--threads", "1")
        found["vllm, our draft model"] = _Method(drafter=ours)
    return found


async def _start_vllm(
    python: Path, target: Path, method: _Method, running: AsyncExitStack
) -> peer_process.Ask:
    """Start vLLM, with Outrider's scheduler unless `method.drafter` is None.

    If `method.drafter` has flags, Outrider's drafter is started with them. If the drafter has died,
    asking raises PeerDied with its last lines.
    """
    flags = ["--dtype", "auto", "--max-sequences", str(MOST_AT_ONCE)]
    listen = f"{LOOPBACK}:{free_port()}"
    environment = {}
    if method.speculative is not None:
        flags += ["--count-drafts", "--speculative", json.dumps(dict(method.speculative))]
    elif method.drafter is not None:
        flags += ["--count-drafts", "--drafts", str(_VLLM_DRAFT_TOKENS)]
        root = str(Path(__file__).parents[2])
        environment = {"OUTRIDER_VERIFIER_LISTEN": listen, "PYTHONPATH": root}
    process = peer_process.vllm_process(python, target, flags, environment)
    asked = await running.enter_async_context(process)
    if not method.drafter:
        return asked
    words = ("--verifier", listen, "--id", "1", *method.drafter)
    drafter = await start(Launch("drafter", "drafter_svc", words))
    running.push_async_callback(drafter.stop)

    async def ask(task: dict[str, Any]) -> dict[str, Any]:
        """Send a task as a line, and read its answer."""
        answer = await asked(task)
        if not await drafter.alive():
            raise peer_process.PeerDied(f"the drafter died: {(await drafter.tail())[-5:]}")
        return answer

    return ask


def _vllm(process: peer_process.Ask, encoder: Encoder) -> Ask:
    async def ask(requests: Sequence[Request], batch: int, temperature: float, _: str) -> Answer:
        task = {
            "prompts": [request.prompt for request in requests],
            "batch": batch,
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


def _transformers(process: peer_process.Ask, how: str, encoder: Encoder) -> Ask:
    async def ask(requests: Sequence[Request], _: int, temperature: float, __: str) -> Answer:
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
