"""`outrider lab chaos` prints a table, sets its exit status, and plays real campaigns."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from outrider_bench.chaos import playing
from outrider_bench.chaos.history import History
from outrider_bench.commands.chaos import main
from outrider_bench.experiment.processes import StackFailed

ROOT = Path(__file__).parents[2]
QUIET: dict[str, Any] = {"event": "quiet", "in_use": {}, "processes": {}}


def plays(*events: dict[str, Any]) -> Any:
    """Return a campaign that records these events and starts nothing."""

    async def play(campaign: object, bag: object, history: History, *_: object) -> None:
        history.round = 4
        for event in events:
            history.add(**event)

    return play


def fault(name: str) -> dict[str, Any]:
    return {"event": "fault", "name": name, "began": 0.0, "unreachable": [], "allows": []}


@pytest.mark.parametrize(
    ("events", "status"), [((), 0), (({"event": "trouble", "detail": "model ended"},), 1)]
)
def test_a_violation_is_told_with_its_fault_and_makes_the_status_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    events: tuple[dict[str, Any], ...],
    status: int,
) -> None:
    monkeypatch.setattr(playing, "play", plays(fault("drafter killed"), *events, QUIET))
    assert main(["--history", str(tmp_path / "history.jsonl")]) == status
    printed = capsys.readouterr().out
    row = f"| drafter killed | 1 | 0 | 0 | {status} | 0 | 0 |\n"
    assert row in printed
    assert row in (tmp_path / "history.md").read_text()
    assert ("round 4: lost: model ended" in printed) == bool(status)


def test_a_campaign_that_ends_early_has_the_status_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def play(*_: object) -> None:
        raise StackFailed("verifier-1 was not ready")

    monkeypatch.setattr(playing, "play", play)
    assert main(["--history", str(tmp_path / "history.jsonl")]) == 1
    assert "verifier-1 was not ready" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_campaign_reports_its_whole_rounds_and_ends_with_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    events = [fault("drafter killed"), QUIET]

    async def play(campaign: object, bag: object, history: History, *_: object) -> None:
        await plays(*events)(campaign, bag, history)
        history.round = 5
        history.add(**fault("gateway killed"))
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    monkeypatch.setattr(playing, "play", play)
    path = tmp_path / "history.jsonl"
    assert main(["--history", str(path)]) == 1
    assert "interrupted" in capsys.readouterr().out
    table = (tmp_path / "history.md").read_text()
    assert "| all rounds | 1 |" in table
    assert "gateway killed" not in table


def test_a_fault_that_does_not_exist_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--kind", "flood"])
    assert caught.value.code == 2
    assert "there is no fault 'flood'" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_drafters_and_verifiers_lose_alter_and_leak_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    kinds = ["drafter killed", "drafter frozen", "verifier killed", "gateway link reset"]
    kinds += ["hostile drafter: lies", "clients leave"]
    asked = [word for kind in kinds for word in ("--kind", kind)]
    history = tmp_path / "history.jsonl"
    status = main([*asked, "--minutes", "0.5", "--seed", "1", "--history", str(history)])
    assert status == 0, capsys.readouterr().out
    events = [json.loads(line) for line in history.read_text().splitlines()]
    assert {event["name"] for event in events if event["event"] == "fault"} <= {*kinds}
    requests = [event for event in events if event["event"] == "request"]
    assert sum(event["outcome"] == "finished" for event in requests) > 20
    # The campaign was long enough for one round, even on a slow machine.
    assert sum(event["event"] == "quiet" for event in events) >= 1
