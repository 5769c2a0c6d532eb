"""The start of a stack prints one state at a time, errors at once, and no other progress."""

import pytest

from outrider.launch.start_log import StartLog

WAITS = "2026-11-25 02:00:00,000 INFO outrider.drafter.stream: waiting for the verifier"
WARNS = "2026-11-25 02:00:00,000 WARNING outrider.lm.cpu.library: decoding is slower"


@pytest.fixture
def printed() -> list[str]:
    return []


@pytest.fixture
def log(printed: list[str]) -> StartLog:
    return StartLog(lambda name, line: printed.append(line))


def test_warnings_and_tracebacks_of_a_start_are_printed_at_once(
    log: StartLog, printed: list[str]
) -> None:
    lines = [WARNS, "Traceback (most recent call last):", "RuntimeError: INFO is missing"]
    for line in lines:
        log.line("verifier", line)
    assert printed == lines


@pytest.mark.parametrize(
    "line",
    [
        WAITS,
        "gateway listening on http://127.0.0.1:8000 (OpenAI API) and 127.0.0.1:8001 (gRPC)",
        "verifier listening on 127.0.0.1:50051",
        "verifier ready: models/target in bfloat16 on cpu",
        "drafter ngram-1 registered with unix:/tmp/verifier.sock",
    ],
)
def test_reports_of_progress_are_printed_only_after_the_start(
    line: str, log: StartLog, printed: list[str]
) -> None:
    log.line("process", line)
    log.ready()
    assert printed == []
    log.line("process", line)
    assert printed == [line]


def test_a_failed_start_prints_its_reports_of_progress(log: StartLog, printed: list[str]) -> None:
    log.line("drafter", WAITS)
    log.failed()
    assert printed == [WAITS]
