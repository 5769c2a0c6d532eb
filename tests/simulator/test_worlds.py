"""Simulated worlds with faults: no schedule changes a text, loses a request or leaks a page."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.lm.runner import SequenceSlice
from outrider.protocol.messages import TokenRequest
from outrider_bench.simulator.events import Events
from outrider_bench.simulator.worlds.campaign import (
    failure_of,
    run_campaign,
    show_campaign,
    shrink,
)
from outrider_bench.simulator.worlds.checked_verifier import CheckedVerifier
from outrider_bench.simulator.worlds.client import Client
from outrider_bench.simulator.worlds.plan import draw_world
from outrider_bench.simulator.worlds.play import play
from outrider_bench.simulator.worlds.requests import (
    REQUEST_COUNT,
    answer_of,
    modulus_of,
    request_of,
)
from outrider_bench.simulator.worlds.target import PagedTarget

ROOT = Path(__file__).parents[2]
SEEDS = Path(__file__).with_name("world_seeds.txt")


def found_seeds() -> list[int]:
    """Return the seeds of the file, without its comments."""
    lines = [line.partition("#")[0].strip() for line in SEEDS.read_text().splitlines()]
    return [int(line) for line in lines if line]


# World 74 notices mutant X12, and the first fifty worlds do not. So the quick suite plays 50 to 99.
@pytest.mark.parametrize(
    "worlds",
    [
        range(50, 100),
        pytest.param(range(50), marks=pytest.mark.slow),
        pytest.param(range(100, 200), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_worlds_of_fixed_seeds_keep_every_invariant(worlds: range) -> None:
    played = run_campaign(worlds)
    assert played.failures == {}
    assert played.counts["worlds"] == len(worlds)
    assert played.message_count > 100 * len(worlds)
    # The worlds had each kind of fault, and requests ended in each possible way.
    assert len([name for name in played.counts if name.startswith("fault: ")]) == 19
    for name in ("finished", "left", "failed", "resumed", "moved"):
        assert played.counts[f"requests {name}"] > 0
    for name in ("preemptions", "accepted on branches", "violations refused", "stale tokens"):
        assert played.counts[name] > 0


def test_no_world_that_found_a_defect_finds_it_again() -> None:
    assert found_seeds() != []
    assert run_campaign(iter(found_seeds())).failures == {}


def digests() -> list[str]:
    """Return the digests of some worlds' histories."""
    return [play(draw_world(seed)).digest for seed in range(8)]


@pytest.mark.slow  # a process that loads torch; test_simulator.py starts one in the quick suite
def test_a_world_is_a_pure_function_of_its_seed_in_any_process() -> None:
    here = digests()
    assert len(set(here)) == len(here)
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    code = "from tests.simulator.test_worlds import digests; print(digests())"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout == f"{here}\n"


def test_greedy_answers_are_the_argmax_of_the_target() -> None:
    checked = 0
    for number in range(REQUEST_COUNT):
        request = request_of(number)
        sampling = request.sampling
        if sampling.greedy and not sampling.adjusts and modulus_of(number) == 0:
            text = answer_of(number).token_ids
            assert text == likeliest_tokens(request.prompt, len(text))
            checked += 1
    assert checked > 10


def likeliest_tokens(prompt: list[int], count: int) -> list[int]:
    """Return the argmax of forwards that each read a whole text at once, without an engine."""
    tokens = [*prompt]
    while len(tokens) < len(prompt) + count:
        target = PagedTarget(Events(), 1, len(tokens))
        [logits] = target.forward([SequenceSlice(tokens, 0, [0], 1)])
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


# --- planted defects ---

Plant = Callable[[pytest.MonkeyPatch], None]


def moves_nothing(patch: pytest.MonkeyPatch) -> None:
    """Let the cache keep rejected branches where accepted branches should be."""
    patch.setattr(PagedTarget, "move_tokens", lambda self, sources, targets: None)


def tells_clients_twice(patch: pytest.MonkeyPatch) -> None:
    receive = Client._receive

    def twice(self: Client, *message: Any) -> None:
        receive(self, *message)
        receive(self, *message)

    patch.setattr(Client, "_receive", twice)


def resumes_from_the_prompt(patch: pytest.MonkeyPatch) -> None:
    """Let a request that moves start over, though its client already has tokens."""
    rest = Client._rest
    patch.setattr(Client, "_rest", lambda self: replace(rest(self), committed=[]))


def loses_a_request(patch: pytest.MonkeyPatch) -> None:
    """Let the verifier send no answers."""
    submit = CheckedVerifier.submit

    def lose(self: CheckedVerifier, number: int, request: TokenRequest, sink: Any) -> Any:
        return submit(self, number, request, lambda message: None)

    patch.setattr(CheckedVerifier, "submit", lose)


@pytest.mark.parametrize(
    ("plant", "noticed"),
    [
        (moves_nothing, "the text is the target's own"),
        (tells_clients_twice, "no token is missing, doubled or altered"),
        (resumes_from_the_prompt, "no token is missing, doubled or altered"),
        (loses_a_request, "each request ends"),
    ],
)
def test_a_planted_defect_is_noticed(
    plant: Plant, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(noticed in failure_of(draw_world(seed))[0] for seed in range(150))


def test_a_failing_world_shrinks_to_the_fault_that_breaks_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(self: Client, after_s: float) -> None:
        raise RuntimeError(f"planted at {self.plan.name}")

    monkeypatch.setattr(Client, "move", crash)
    seed = next(
        seed
        for seed in range(100)
        if [fault.what for fault in draw_world(seed).faults].count("move") > 1
    )
    smallest = shrink(draw_world(seed))
    assert "planted at" in failure_of(smallest)[0]
    [fault] = smallest.faults
    assert fault.what == "move"
    assert smallest.drafters == ()
    assert [request.name for request in smallest.requests] == [fault.who]
    assert show_campaign(seed, 1) == 1
    printed = capsys.readouterr().out
    assert f"outrider lab simulate --faults 1 --seed {seed}" in printed
    assert str(fault) in printed
