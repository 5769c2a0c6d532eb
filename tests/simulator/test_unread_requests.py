"""An answer that its client does not read stops when buffers are full, and later ends."""

from __future__ import annotations

import json
from pathlib import Path

from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import Simulation
from outrider_bench.simulator.traffic import UNREAD_CHUNKS, UNREAD_S


def test_an_unread_answer_stops_and_leaves_the_steps_to_others(tmp_path: Path) -> None:
    recording = tmp_path / "recording.jsonl"
    lines = [
        {"time": 0.0, "prompt_tokens": 8, "output_tokens": 1500, "kind": "unread", "reads": False},
        {"time": 1.0, "prompt_tokens": 8, "output_tokens": 1500, "kind": "read"},
    ]
    recording.write_text("\n".join(map(json.dumps, lines)))
    given = {"arrivals": "recorded", "recording": recording, "seconds": UNREAD_S + 60}
    simulation = Simulation(Scenario.model_validate(given), 1)
    simulation.run()
    unread, read = simulation.traffic.requests
    assert UNREAD_CHUNKS <= len(unread.received_at) < UNREAD_CHUNKS + 100
    assert unread.late
    assert len(read.received) == 1500
