"""Measures what a decode step of vLLM costs with the features of one head.

    python -m tests.vllm.feature_price [TARGET HEAD]

The target is in float32; without arguments it is SmolLM2, with its EAGLE-3 head. A table has the
milliseconds of a step at batch 1, 4 and 8: without states, with the head's states returned by every
forward though nobody reads them, and with a head that reads them through its first matrix. Nobody
drafts. Processes without and with states take turns, since vLLM fixes the states at the start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.vllm.write_texts import choose_runner

if TYPE_CHECKING:
    from tests.verifier.fake_model import ScriptedDrafter
    from verifier_svc.vllm.engine import VllmEngine

BATCHES = (1, 4, 8)
ROUNDS = 3
PROCESSES = 2
PROMPT = 64
STEPS = 40


def main() -> None:
    """Start the processes and print the table; as one of the processes, measure."""
    if sys.argv[1:2] == ["measure"]:
        states, target, head = sys.argv[2:]
        _measure(target, head if states == "states" else None)
        return
    target, head = sys.argv[1:] or _smollm2()
    found: dict[str, dict[str, list[float]]] = {}
    for states in ("plain", "states") * PROCESSES:
        command = [sys.executable, "-m", "tests.vllm.feature_price", "measure", states]
        done = subprocess.run([*command, target, head], stdout=subprocess.PIPE, check=True)
        for way, batches in json.loads(done.stdout).items():
            for batch, medians in batches.items():
                found.setdefault(way, {}).setdefault(batch, []).extend(medians)
    print("milliseconds of a step: the median of all rounds, and their range")
    print("| batch |", *(f"{way} |" for way in found))
    for batch in map(str, BATCHES):
        times = [found[way][batch] for way in found]
        cells = [f"{median(t):.2f} ({min(t):.2f}–{max(t):.2f}) |" for t in times]
        print(f"| {batch} |", *cells)


def _smollm2() -> tuple[str, str]:
    from outrider.gguf import pretrained
    from outrider.smollm2 import gguf_file
    from tests.stack import ROOT

    return pretrained(gguf_file()), str(ROOT / "models/smollm2/eagle3")


def _measure(target: str, head: str | None) -> None:
    """Print the medians of each way and batch, in milliseconds, as JSON."""
    choose_runner(v2=False)
    # What vLLM and its libraries print goes to standard error.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        from tests.vllm.take_features import make_engine
        from verifier_svc.config import VerifierSettings

        projections = [] if head is None else [head]
        settings = VerifierSettings(target=target, engine="vllm", feature_projection=projections)
        engine = make_engine(settings, v2=False, max_model_len=512, enforce_eager=True)
        ways = ["without states"] if head is None else ["states that nobody reads", "a head reads"]
        found: dict[str, dict[int, list[float]]] = {
            way: {batch: [] for batch in BATCHES} for way in ways
        }
        for _ in range(ROUNDS):
            for way in ways:
                reader = _reader(engine) if way == "a head reads" else None
                for batch in BATCHES:
                    found[way][batch].append(1e3 * _step_s(engine, batch, reader))
                if reader is not None:
                    engine.drafting.leave(reader.handle)
        json.dump(found, answer)


def _reader(engine: VllmEngine) -> ScriptedDrafter:
    """Return a drafter in vLLM's process, which reads projected states and never drafts."""
    from types import SimpleNamespace

    from outrider.protocol.draft_messages import FeatureDtype, FeatureRequest
    from tests.verifier.fake_model import ScriptedDrafter

    states = engine._hub._states
    assert states is not None
    [(name, projection)] = states.projections.items()
    wanted = FeatureRequest(tuple(projection.states), dtype=FeatureDtype.FLOAT32, projection=name)
    ours: Any = SimpleNamespace(drafting=engine.drafting, drain_inbox=lambda: None)
    reader = ScriptedDrafter(ours, "reader", "reader", is_local=True, feature_request=wanted)
    # The engine opens few sequences to a drafter that has not guessed right yet.
    reader.prove()
    return reader


def _step_s(engine: VllmEngine, batch: int, reader: ScriptedDrafter | None) -> float:
    """Return the median seconds of the steps in which all sequences of a batch decode."""
    from outrider.protocol.messages import SamplingParams, TokenRequest

    greedy = SamplingParams(temperature=0.0)
    sequences = [
        engine.submit(
            TokenRequest([*range(100 + i, 100 + i + PROMPT)], STEPS, greedy, ignore_eos=True),
            lambda _: None,
        )
        for i in range(batch)
    ]
    seconds: list[float] = []
    while engine._llm.has_unfinished_requests():
        all_decode = all(len(each.tokens) > PROMPT for each in sequences)
        began = time.perf_counter()
        engine.step()
        if all_decode:
            seconds.append(time.perf_counter() - began)
        for sequence in sequences:
            is_known = reader is not None and sequence.id in engine._hub.sequences
            if is_known and reader.length.get(sequence.id) == len(sequence.tokens):
                reader.skip(sequence.id)
    if reader is not None:
        rows = sum(len(message.features) for message in reader.received)
        assert rows >= batch * (STEPS - 2), "the reader missed features"
        reader.received.clear()
    return median(seconds)


if __name__ == "__main__":
    main()
