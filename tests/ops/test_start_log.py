"""The start of a stack prints one state at a time, errors at once, and no other progress."""

import pytest

from outrider_cli.start_log import StartLog

WAITS = "2026-11-25 02:00:00,000 INFO outrider.drafter.stream: waiting for the verifier"
WAITS_IN_JSON = '{"time": "2026-11-25T02:00:00.000+00:00", "level": "info", "logger": "x"}'
WARNS = "2026-11-25 02:00:00,000 WARNING outrider.lm.cpu.library: decoding is slower"


PROGRESS = (
    WAITS,
    WAITS_IN_JSON,
    "gateway listening on http://127.0.0.1:8000 (OpenAI API) and 127.0.0.1:8001 (gRPC)",
    "verifier listening on 127.0.0.1:50051",
    "verifier ready: models/target in bfloat16 on cpu",
    "drafter ngram-1 registered with unix:/tmp/verifier.sock",
)
GUESS = "2026-11-25 02:00:00,000 INFO gateway.server: format of tool calls: hermes; mark of …"
ERRORS = (WARNS, GUESS, "Traceback (most recent call last):", "RuntimeError: INFO is missing")


@pytest.mark.parametrize("fails", [False, True])
def test_reports_of_progress_are_printed_after_a_start_or_if_it_failed(fails: bool) -> None:
    printed: list[str] = []
    log = StartLog(lambda name, line: printed.append(line))
    for line in (*PROGRESS, *ERRORS):
        log.line("process", line)
    assert printed == list(ERRORS)
    if fails:
        log.failed()
        assert sorted(printed) == sorted([*PROGRESS, *ERRORS])
        return
    log.ready()
    for line in PROGRESS:
        log.line("process", line)
    assert printed == [*ERRORS, *PROGRESS]
