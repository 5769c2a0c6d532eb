"""`outrider bench --only prediction`: the simulator's tokens/s beside those of the real stack.

Both serve the same requests. Every second round is a profile: it corrects the table of costs, since
gateway, drafters and clients work on the machine of the forwards. The other rounds are compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.delay import Proxy, delayed_stack
from bench.report import PHASES, spread
from bench.simulator.costs import Costs
from bench.simulator.measured_costs import measure as measure_costs
from bench.simulator.scenario import Scenario
from bench.simulator.simulation import simulate
from bench.simulator.traffic import RecordedRequest
from bench.simulator.world import NO_GUESS, RIGHT
from bench.ways import Measure, Pair, Sample, Task
from drafter_svc.pools.memory import MemoryPool, NgramOptions
from drafter_svc.stream import wait_until_ready
from outrider import rpc
from outrider.lm.runner import ModelRunner, Slice

_WAYS: dict[str, dict[str, Any]] = {
    "plain": {"enabled": False},
    "ngram": {"drafter": "ngram"},
    "model": {"drafter": "model"},
}
_DRAFTED = ("ngram", "model")
_BATCHES = (1, 8)
_DELAYS_MS = (0, 20)
_REPEATS = 4
_WRONG = "-"
_POOL_ENTRIES = 1_000_000

CellKey = tuple[str, int, int]
"""A way, a batch size and a delay in ms."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of the stack while it serves. Those by batch size have one number for each of `_BATCHES`, in seconds."""

    slowdown: list[float]
    """Forwards, over those on an idle machine."""
    host_s: dict[str, list[float]]
    """The host's work for a step, by way."""
    sequences: list[float]
    """In a step."""
    interference: list[float]
    """Share of a draft model's time by which forwards get longer meanwhile."""
    client_s: dict[str, list[float]]
    """From a client to the verifier, and the same back; by way and batch size."""
    round_trip_s: dict[str, list[float]]
    """From a verdict to a draft, without the drafting, at no delay; by drafter and batch size."""
    jitter_s: dict[str, list[float]]
    """By which messages of the draft stream are late at most; by drafter and batch size."""
    draft_token_s: dict[str, list[float]]
    """Drafting a token for each sequence; by drafter and batch size."""


@dataclass(slots=True)
class _Rounds:
    """Samples of the same kind of rounds; and what the verifier measured of the drafters, by drafter and batch size."""

    samples: dict[CellKey, list[Sample]] = field(default_factory=dict)
    round_trip_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    draft_token_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    async def measure(self, ways: dict[str, Measure], tasks: dict[int, Task], proxy: Proxy) -> None:
        """One round of all cells."""
        for delay_ms in _DELAYS_MS:
            proxy.delay_s = delay_ms / 1000
            for batch, task in tasks.items():
                for name, run in ways.items():
                    self.samples.setdefault((name, batch, delay_ms), []).append(await run(task))
                    if delay_ms == 0 and name != "plain":
                        await self._ask_verifier(name, batch, proxy.port)

    async def _ask_verifier(self, family: str, batch: int, port: int) -> None:
        async with rpc.dial(f"127.0.0.1:{port}") as channel:
            info = await wait_until_ready(channel)
        [drafter] = [drafter for drafter in info.drafters if drafter.family == family]
        self.round_trip_s.setdefault((family, batch), []).append(drafter.round_trip_s or 0.0)
        self.draft_token_s.setdefault((family, batch), []).append(drafter.token_s or 0.0)


async def measure(pair: Pair, prompts: list[list[int]], rounds: int, tokens: int, console: Console) -> dict[str, Any]:
    """Measure, profile and simulate each cell; print the table and return the record."""
    tasks = {batch: _task(prompts, batch, tokens) for batch in _BATCHES}
    costs = measure_costs(pair.target, pair.draft, pair.shared_threads, pair.dtype)
    profiled, compared = _Rounds(), _Rounds()
    async with delayed_stack(pair) as (way, proxy):
        ways: dict[str, Measure] = {name: way(speculation) for name, speculation in _WAYS.items()}
        # One of each in turn, so that a machine that gets slower or faster meets both alike. One warms up.
        for found in (_Rounds(), *[profiled, compared] * rounds):
            await found.measure(ways, tasks, proxy)
    profile = _profile(profiled, costs)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        for name in _WAYS:
            (path / f"{name}.json").write_text(_busy(costs, profile, name).model_dump_json())
        for batch, task in tasks.items():
            # The real drafters were known from earlier rounds.
            lines = [request.model_dump_json() for request in record(pair, task)] * _REPEATS
            (path / f"{batch}.jsonl").write_text("\n".join(lines))
        predicted = {cell: _predict(path, *cell, profile) for cell in compared.samples}
    console.print(_table(pair, compared.samples, predicted, rounds))
    cells = [
        {
            "way": name,
            "batch": batch,
            "delay_ms": delay_ms,
            "tokens_per_s": [_rate(sample) for sample in samples],
            "simulated": _rate(predicted[name, batch, delay_ms]),
            "counters": [sample.counters for sample in samples],
            "simulated_counters": predicted[name, batch, delay_ms].counters,
        }
        for (name, batch, delay_ms), samples in compared.samples.items()
    ]
    return {"profile": asdict(profile), "costs": costs.model_dump(mode="json"), "cells": cells}


def _task(prompts: list[list[int]], batch: int, tokens: int) -> Task:
    count = max(8, 4 * batch)
    return Task([prompts[i % len(prompts)] for i in range(count)], batch, tokens, 0.0, varied=True)


# --- what the simulator is told ---


def record(pair: Pair, task: Task) -> list[RecordedRequest]:
    """The task's requests in order, with what the drafters would guess for each token of the output."""
    prompts = [list(prompt) for prompt in dict.fromkeys(map(tuple, task.prompts))]
    size = max(map(len, prompts)) + 2 * task.max_tokens
    target, draft = (
        ModelRunner.load(str(path), dtype=pair.dtype, page_count=len(prompts) * (-(-size // 16)))
        for path in (pair.target, pair.draft)
    )
    longest = max(task.lengths)
    outputs = _greedy(target, prompts, longest)
    known: dict[tuple[int, ...], dict[str, str]] = {}
    for prompt, output in zip(prompts, outputs, strict=True):
        known[tuple(prompt)] = {"model": _model_guesses(draft, prompt, output), "ngram": _ngram_guesses(prompt, output)}
    return [
        RecordedRequest(time=0.0, prompt_tokens=len(prompt), output_tokens=length, guesses=known[tuple(prompt)])
        for prompt, length in zip(task.prompts, task.lengths, strict=True)
    ]


def _greedy(target: ModelRunner, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """`count` tokens of each, whether the text ends or not."""
    pages = -(-(max(map(len, prompts)) + count) // target.page_size)
    own = [[*range(i * pages, (i + 1) * pages)] for i in range(len(prompts))]
    last = [int(target.forward([Slice(prompt, 0, held, 1)])[0].argmax()) for prompt, held in zip(prompts, own, strict=True)]
    outputs = [[token] for token in last]
    while len(outputs[0]) < count:
        slices = [
            Slice([output[-1]], len(prompt) + len(output) - 1, held, 1)
            for prompt, output, held in zip(prompts, outputs, own, strict=True)
        ]
        for output, token in zip(outputs, target.forward(slices).argmax(-1).tolist(), strict=True):
            output.append(token)
    return outputs


def _model_guesses(draft: ModelRunner, prompt: list[int], output: list[int]) -> str:
    """What the draft model holds for the likeliest token at each place, the tokens before it being the target's."""
    text = [*prompt, *output[:-1]]
    logits_RV = draft.forward([Slice(text, 0, [*range(-(-len(text) // draft.page_size))], len(output))])
    guesses = logits_RV.argmax(-1).tolist()
    return "".join(RIGHT if guess == token else _WRONG for guess, token in zip(guesses, output, strict=True))


def _ngram_guesses(prompt: list[int], output: list[int]) -> str:
    """What lookups find in the text so far. A run goes on until it is wrong or at its end."""
    options = NgramOptions()
    pool, text, found = MemoryPool(options, _POOL_ENTRIES), list(prompt), ""
    pool.index(text, 0)
    run: list[int] = []
    for token in output:
        run = run or pool.continuation(text[-options.max_matching_ngram_size :], options.max_draft_len)
        right = run[:1] == [token]
        found += NO_GUESS if not run else RIGHT if right else _WRONG
        run = run[1:] if right else []
        text.append(token)
        pool.index(text, len(text) - 1)
    return found


def _profile(rounds: _Rounds, costs: Costs) -> Profile:
    samples = rounds.samples
    steps = {way: [_step(samples[way, batch, 0]) for batch in _BATCHES] for way in _WAYS}
    slowdown = [step["forward"] / _expected_s(step, costs) for step in steps["plain"]]
    times = {way: [median(rounds.draft_token_s[way, batch]) for batch in _BATCHES] for way in _DRAFTED}
    round_trips = {way: [median(rounds.round_trip_s[way, batch]) for batch in _BATCHES] for way in _DRAFTED}
    interference = []
    for step, slower, token_s in zip(steps["model"], slowdown, times["model"], strict=True):
        # A forward loses at most all of the time in which a draft model drafts beside it.
        forward_s = slower * _expected_s(step, costs)
        beside_s = min(token_s * step["proposed"] / step["sequences"], forward_s)
        interference.append(min(max(0.0, step["forward"] - forward_s) / max(beside_s, 1e-9), 1.0))
    # No step waits for a draft that is so far away: what is called waiting there is planning.
    planning_s = {way: [_step(samples[way, batch, _DELAYS_MS[-1]])["wait"] for batch in _BATCHES] for way in _WAYS}
    host_s = {way: [step["host"] for step in steps[way]] for way in _WAYS}
    # A plain step commits a token of each sequence. What tokens take beyond the steps passes between these.
    tpot_s = [median([tpot for sample in samples["plain", batch, 0] for tpot in sample.tpot]) for batch in _BATCHES]
    phases = ("forward", "host", "wait")
    between_s = [max(0.0, tpot - sum([s[name] for name in phases])) for tpot, s in zip(tpot_s, steps["plain"], strict=True)]
    return Profile(
        slowdown=slowdown,
        host_s={way: [sum(parts) for parts in zip(host_s[way], planning_s[way], between_s, strict=True)] for way in _WAYS},
        sequences=[step["sequences"] for step in steps["plain"]],
        interference=interference,
        client_s={way: [_client_s(samples[way, batch, 0]) for batch in _BATCHES] for way in _WAYS},
        round_trip_s=round_trips,
        jitter_s={
            way: [_jitter_s(*zipped) for zipped in zip(steps[way], round_trips[way], times[way], strict=True)] for way in _DRAFTED
        },
        draft_token_s=times,
    )


def _expected_s(step: dict[str, float], costs: Costs) -> float:
    """Seconds of such a step's forward on an idle machine; prompts are spread over all steps."""
    count = max(1, round(step["sequences"]))
    prompts_s = step["prompts"] * costs.prompt_step_s + step["prompt_tokens"] * costs.prompt_token_s
    return costs.forward_s(count, count + round(step["drafted"])) + prompts_s


def _jitter_s(step: dict[str, float], round_trip_s: float, token_s: float) -> float:
    """Seconds by which messages are late at most, in each direction: answers take that much longer on average than the median."""
    usual_s = round_trip_s + token_s * step["drafted"] / max(step["drafts"], 1e-9)
    return max(0.0, step["answers_s"] / max(step["answers"], 1e-9) - usual_s)


def _client_s(samples: list[Sample]) -> float:
    """Seconds from a client to the verifier: half of what is left of the time to the first token."""
    within_s = [sum([_mean(s.counters, f"request_{name}_time_seconds") for name in ("queue", "prefill")]) for s in samples]
    return max(0.0, median([ttft for sample in samples for ttft in sample.ttft]) - median(within_s)) / 2


def _step(samples: list[Sample]) -> dict[str, float]:
    """Means of a step: seconds of its forward and of the host's work, and counts."""

    def each(*names: str) -> float:
        counters = [sample.counters for sample in samples]
        return median([sum([c.get(name, 0.0) for name in names]) / c["step_seconds_count"] for c in counters])

    return {
        "forward": each("step_phase_seconds.forward"),
        "host": each(*[f"step_phase_seconds.{name}" for name in PHASES if name not in ("forward", "wait")]),
        "wait": each("step_phase_seconds.wait"),
        "sequences": each("step_sequences_sum"),
        "drafted": each("spec_decode_num_draft_tokens"),
        "proposed": each("proposed_tokens"),
        "drafts": each("spec_decode_num_drafts"),
        "answers": each("draft_latency_seconds_count"),
        "answers_s": each("draft_latency_seconds_sum"),
        "prompts": each("request_prefill_time_seconds_count"),
        "prompt_tokens": each("prefix_cache_queries"),
    }


def _mean(counters: dict[str, float], name: str) -> float:
    return counters[f"{name}_sum"] / counters[f"{name}_count"]


def _busy(costs: Costs, profile: Profile, way: str) -> Costs:
    """The table of a machine that serves in this way."""
    host_s, counts = profile.host_s[way], profile.sequences
    each_s = max(0.0, (host_s[1] - host_s[0]) / (counts[1] - counts[0]))
    (one, many), (low, high) = _BATCHES, profile.slowdown

    def slowdown(sequences: int) -> float:
        return low + (high - low) * min((sequences - one) / (many - one), 1.0)

    return costs.model_copy(
        update={
            "forwards": [f.model_copy(update={"seconds": f.seconds * slowdown(f.sequences)}) for f in costs.forwards],
            "prompt_step_s": costs.prompt_step_s * low,
            "prompt_token_s": costs.prompt_token_s * low,
            "host_step_s": max(0.0, host_s[0] - each_s),
            "host_sequence_s": each_s,
            "drafting": {
                name: cost.model_copy(update={"token_s": dict(zip(_BATCHES, profile.draft_token_s[name], strict=True))})
                for name, cost in costs.drafting.items()
                if name in _DRAFTED
            },
        }
    )


def _predict(directory: Path, way: str, batch: int, delay_ms: int, profile: Profile) -> Sample:
    drafter = (
        {}
        if way == "plain"
        else {
            "name": way,
            "cost": way,
            "acceptance": 0.0,
            "interference": profile.interference[_BATCHES.index(batch)] if way == "model" else 0.0,
            "round_trip_ms": 1000 * profile.round_trip_s[way][_BATCHES.index(batch)] + delay_ms,
            "jitter_ms": 1000 * profile.jitter_s[way][_BATCHES.index(batch)],
        }
    )
    scenario = Scenario.model_validate(
        {
            "costs": str(directory / f"{way}.json"),
            "recording": str(directory / f"{batch}.jsonl"),
            "seconds": 600.0,
            "sequences": [batch],
            "client_ms": 1000 * profile.client_s[way][_BATCHES.index(batch)],
            "max_sequences": 64,
            "drafters": [drafter] if drafter else [],
        }
    )
    return simulate(scenario, batch, drafting=bool(drafter)).sample


def _table(pair: Pair, real: dict[CellKey, list[Sample]], predicted: dict[CellKey, Sample], rounds: int) -> Table:
    table = Table(
        title=f"{pair.name}: tokens/s of the real stack, median of {rounds} rounds (range), and simulated with the same costs"
    )
    columns = ("way", "batch", "delay, ms", "real", "simulated", "simulated / real", "tokens a step, real", "simulated")
    for name in columns:
        table.add_column(name, justify="left" if name == "way" else "right")
    for (name, batch, delay_ms), samples in sorted(real.items()):
        rates, simulated = [_rate(sample) for sample in samples], predicted[name, batch, delay_ms]
        table.add_row(
            name,
            str(batch),
            str(delay_ms),
            spread(rates, 1),
            f"{_rate(simulated):.1f}",
            f"{_rate(simulated) / median(rates):.2f}",
            f"{median(_tokens_a_step(sample) for sample in samples):.2f}",
            f"{_tokens_a_step(simulated):.2f}",
        )
    return table


def _rate(sample: Sample) -> float:
    """tokens/s while the batch is full: how a run ends depends on which request is the last."""
    return sample.full_tokens_per_s or sample.tokens_per_s


def _tokens_a_step(sample: Sample) -> float:
    """Tokens that a step commits for a sequence."""
    return sample.counters["generation_tokens"] / sample.counters["step_sequences_sum"]
