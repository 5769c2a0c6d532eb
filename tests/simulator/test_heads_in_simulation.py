"""The family of heads in virtual time: features pass the link, and a table times the rounds."""

import json
from pathlib import Path
from typing import Any

from drafter_svc.families.head_worker import Offer
from outrider.heads.model import Branch
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.simulation import Outcome, Simulation

PROMPT = [*range(100, 140)]
OUTPUT = [*range(1000, 1096)]
TAIL = [*range(5000, 5032)]
HIDDEN, STATES = 1024, 3
HEAD = {"name": "head", "drafts_by": "head", "states": STATES, "round_trip_ms": 0.5}
WRONG = 9


def offer(at: int, right: int, *, beside: bool) -> Offer:
    """Return an offer of tokens that follow `at` output tokens.

    The number `right` says how many tokens at the offer's beginning are right; later tokens are
    wrong. With `beside`, the first wrong token has a branch of two true tokens beside it.
    """
    true = [*OUTPUT, *TAIL][at : at + 8]
    tokens = [*true[:right], *[WRONG] * (len(true) - right)]
    alternatives: list[list[tuple[int, float]]] = [[] for _ in tokens]
    deeper = []
    if beside:
        alternatives[right] = [(true[right], 0.4)]
        deeper = [Branch(right, true[right : right + 2], [0.4, 0.9])]
    shares = [0.9 if i < right else 0.5 for i in range(len(tokens))]
    return Offer(tokens, shares, alternatives, deeper)


def run(
    tmp_path: Path, right: int = 8, hidden: int = HIDDEN, *, beside: bool = False, **more: Any
) -> Simulation:
    """Return a simulation of one request, with a head whose first `right` guesses are right."""
    recording = tmp_path / "requests.jsonl"
    asked = {"prompt_tokens": len(PROMPT), "output_tokens": len(OUTPUT), "prompt_ids": PROMPT}
    recording.write_text(json.dumps({**asked, "output_ids": OUTPUT + TAIL}))
    given = {
        "costs": "assumed-gpu",
        "seconds": 600.0,
        "sequences": [1],
        "recording": str(recording),
        "hidden_size": hidden,
        "drafters": [HEAD | more],
        "always_draft": True,
    }
    simulation = Simulation(Scenario.model_validate(given), 1)
    offers = [offer(at, right, beside=beside) for at in range(len(OUTPUT))]
    simulation.world.offers = {tuple(PROMPT): {"head": offers}}
    return simulation


def tokens_a_step(outcome: Outcome) -> float:
    counters = outcome.sample.counters
    return counters["generation_tokens"] / counters["step_sequences_sum"]


def test_offers_are_verified_as_deep_as_they_are_right(tmp_path: Path) -> None:
    rates = [tokens_a_step(run(tmp_path, right).run()) for right in (0, 2, 8)]
    assert rates[0] < 2.0 < rates[1] < 5.0 < rates[2]


def test_a_true_token_beside_the_chain_is_found_in_a_tree(tmp_path: Path) -> None:
    simulation = run(tmp_path, 2, beside=True)
    chain = Simulation(simulation._scenario.model_copy(update={"draft_trees": False}), 1)
    chain.world.offers = simulation.world.offers
    assert tokens_a_step(simulation.run()) > tokens_a_step(chain.run()) + 0.5


def test_the_states_of_each_committed_token_cross_the_link(tmp_path: Path) -> None:
    sent = []
    for hidden in (HIDDEN, 2 * HIDDEN):
        simulation = run(tmp_path, hidden=hidden)
        simulation.run()
        sent.append(simulation.drafters["head"].byte_counts[1])
    count = (sent[1] - sent[0]) / (2 * STATES * HIDDEN)
    # No draft needs the features of the text's end.
    assert len(PROMPT) + len(OUTPUT) - 10 < count <= len(PROMPT) + len(OUTPUT)


def test_a_head_that_lacks_an_offer_changes_nothing(tmp_path: Path) -> None:
    simulation = run(tmp_path)
    simulation.world.offers = {}
    outcome = simulation.run()
    assert outcome.sample.tokens == len(OUTPUT)
    assert tokens_a_step(outcome) == 1.0


def test_a_head_is_slower_the_further_away_it_is(tmp_path: Path) -> None:
    near = {"in_process": True, "round_trip_ms": 0.0}
    places = [near, *({"round_trip_ms": ms} for ms in (0.5, 5.0, 20.0))]
    rates = [run(tmp_path, **place).run().sample.tokens_per_s for place in places]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1.5 * rates[-1]


def test_large_states_on_a_thin_link_are_slow(tmp_path: Path) -> None:
    wide, thin = (run(tmp_path, mbit_s=mbit).run().sample.tokens_per_s for mbit in (0.0, 10.0))
    # At 10 Mbit/s, 6 KiB take 5 ms.
    assert thin < 0.6 * wide
