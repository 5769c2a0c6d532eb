"""How many clients a verifier serves at an equal rate, on a machine whose answer is known."""

from dataclasses import replace
from pathlib import Path

import pytest

from outrider_bench.commands.advise import main
from outrider_bench.experiment.advice import Place, Simulator, Situation
from outrider_bench.experiment.capacity import MOST, Wanted, capacities, most_that_holds, table
from outrider_bench.sample import Sample
from outrider_bench.simulator.costs import Costs

VERIFY_S = 0.004
"""A forward, for each sequence: a saturated machine, which verifies one client after the other."""
DRAFT_S = 0.001
"""A draft token, for each sequence."""


def _costs(draft_s: float) -> Costs:
    return Costs.model_validate(
        {
            "source": "made up for a test",
            "measured": False,
            "forwards": [
                {"sequences": count, "tokens": tokens, "seconds": count * VERIFY_S}
                for count in (1, 256)
                for tokens in (1, 64)
            ],
            "prompt_step_s": 0.0,
            "prompt_token_s": 0.0,
            "host_step_s": 0.0,
            "host_sequence_s": 0.0,
            "drafting": {
                "here": {"round_s": 0.0, "token_s": {n: n * draft_s for n in (1, 256)}},
                "there": {"round_s": 0.0, "token_s": {1: 0.00001}},
            },
        }
    )


def _situation(clients: int, acceptance: float = 0.99) -> Situation:
    costs = _costs(DRAFT_S)
    own = Place("target", "on the target's cores or GPU", "here", 0.1, on_target_cores=True)
    host = Place("host", "on other cores of the host", "here", 0.1)
    far = Place("far", "on another host", "there", 1.0)
    return Situation(costs, costs, (own, host, far), acceptance, clients)


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[int, float]]:
    """Clients and draft tokens by place, at 80 tokens/s for at least half of the requests."""
    asked = capacities(_situation, Wanted(80.0, 0.5))
    return {each.place: (each.clients, each.draft_tokens) for each in asked}


def test_without_a_drafter_as_many_clients_fit_as_forwards_in_a_token(
    found: dict[str, tuple[int, float]],
) -> None:
    # 80 tokens/s leave 12.5 ms for a token, and each client takes 4 ms of it.
    assert found["no drafter"] == (3, 0.0)


def test_remote_drafters_serve_more_clients_by_the_time_that_drafting_took_here(
    found: dict[str, tuple[int, float]],
) -> None:
    here, depth = found["on the target's cores or GPU"]
    there, _ = found["on another host"]
    assert 3 < here < there
    # arXiv 2606.25091: 1 + γ t_d / t_v times as many clients at the same rate.
    assert there / here == pytest.approx(1 + depth * DRAFT_S / VERIFY_S, rel=0.1)


def test_the_rate_holds_for_the_share_of_requests() -> None:
    sample = Sample(4, 1.0, tpot=[0.01, 0.01, 0.01, 0.1])
    assert Wanted(100.0, 0.6).holds(sample)
    assert not Wanted(100.0, 0.95).holds(sample)
    assert not Wanted(101.0, 0.6).holds(sample)


@pytest.mark.parametrize("edge", [0, 1, 5, 30, MOST, 1000])
def test_the_search_finds_the_most(edge: int) -> None:
    asked: list[int] = []

    def holds(clients: int) -> bool:
        asked.append(clients)
        return clients <= edge

    found = most_that_holds(holds, MOST)
    # Above 64 clients it stops within a thirty-second part.
    assert min(edge, MOST) * 31 / 32 - 1 < found <= min(edge, MOST)
    assert max(asked) <= MOST


def test_several_remote_drafters_share_the_sequences() -> None:
    situation = _situation(8)
    # Remote drafters as slow as those here: eight sequences take 8 ms for each draft token.
    slow = replace(situation.far, cost="here")
    simulator = Simulator(situation)
    one, four = (simulator.run(replace(slow, count=n), 0.9).speed for n in (1, 4))
    assert four > 1.2 * one


def test_the_command_prints_clients_by_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(_costs(DRAFT_S).model_dump_json())
    asked = ["--costs", str(path), "--round-trip-ms", "1", "--acceptance", "0.9"]
    flags = [*asked, "--drafter", "here", "--cpu-drafter", "there", "--tokens-per-s", "200"]
    assert main([*flags, "--remote-drafters", "2"]) == 0
    said = capsys.readouterr().out
    assert "clients that get 200 tokens/s each in 95 % of the requests" in said
    assert "no drafter" in said
    assert "on another host, 1 ms away" in said


def test_ratios_need_a_client_without_a_drafter() -> None:
    found = capacities(_situation, Wanted(10_000.0))
    assert [each.clients for each in found] == [0, 0, 0, 0]
    shown = table(found, Wanted(10_000.0))
    assert [*shown.columns[2].cells] == ["–"] * 4
