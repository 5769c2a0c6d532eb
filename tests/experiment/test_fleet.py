"""The fleet simulator: its queues lose nothing, and it agrees with the engine-level simulator."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_bench.fleet import results
from outrider_bench.fleet.compare import Case, compare
from outrider_bench.fleet.faults import Faults
from outrider_bench.fleet.layout import lay_out, peak_rates
from outrider_bench.fleet.queues import ABSENT, fill, spread
from outrider_bench.fleet.rates import QUANTILES, Cell, CellKey, cell_id, cells, keys
from outrider_bench.fleet.servers import Servers
from outrider_bench.fleet.simulation import Simulation
from outrider_bench.fleet.spec import Drafters, Fleet, load

EXAMPLE = Path(__file__).parents[2] / "experiments" / "fleet.yaml"


def fleet(**more: Any) -> Fleet:
    data: dict[str, Any] = {
        "name": "small",
        "regions": {
            "west": {"verifiers": 6, "peak_sequences": 60, "utc_offset_hours": -8},
            "east": {"verifiers": 4, "peak_sequences": 40, "utc_offset_hours": 8},
        },
        "verifiers": {"max_sequences": 16},
        "drafters": {"count": 2, "max_sequences": 16},
        "days": {"hours": [0, 12], "warm_up_s": 10, "window_s": 20},
    }
    return Fleet.model_validate(data | more)


def assumed(asked: Fleet) -> dict[str, Cell]:
    """Rates that are made up: drafting over a good link halves the time of a token."""
    return {cell_id(asked, key): _assumed(key) for key in keys(asked)}


def _assumed(key: CellKey) -> Cell:
    step_s = 0.01 + 0.0002 * key.batch
    good = key.round_trip_ms is not None and key.round_trip_ms < 100
    token_s = step_s * (0.5 + 0.1 * (key.slowness - 1.0) if good else 1.0)
    return Cell(
        tokens_per_s=key.batch / token_s,
        step_s=step_s,
        token_s=token_s,
        busy=0.5 if good else 0.0,
        ttft_s=(0.02 + 0.02 * QUANTILES).tolist(),
        stretch=(0.9 + 0.2 * QUANTILES).tolist(),
    )


def figures(asked: Fleet, base: Fleet | None = None) -> dict[str, Any]:
    """Overall figures, with the traffic of `base` if that is given."""
    known = assumed(asked) | assumed(base or asked)
    peaks = peak_rates(base or asked, Servers(base or asked, known))
    return Simulation(asked, Servers(asked, known), peaks).run().overall()


def test_the_same_seed_gives_the_same_figures() -> None:
    assert figures(fleet()) == figures(fleet())
    assert figures(fleet()) != figures(fleet(seed=1))


def test_requests_under_way_obey_littles_law() -> None:
    found = figures(fleet(drafters={"count": 2, "max_sequences": 16, "mean_down_s": 0}))
    time_s = (found["ttft_p50_ms"] + 127 * found["tpot_mean_ms"]) / 1000
    assert found["under_way"] == pytest.approx(found["requests_per_s"] * time_s, rel=0.05)


def test_closed_arrivals_keep_as_many_under_way() -> None:
    found = figures(fleet(traffic={"arrivals": "closed"}))
    assert found["under_way"] == pytest.approx(100, rel=0.01)
    assert found["requests"] > 0


def test_a_full_region_sends_requests_to_others() -> None:
    """West has a peak beyond its 96 places at 15:00 of its own time, which is 23:00 UTC."""
    regions = {
        "west": {"verifiers": 6, "peak_sequences": 120, "utc_offset_hours": -8},
        "east": {"verifiers": 10, "peak_sequences": 10, "utc_offset_hours": 8},
    }
    days = {"hours": [23], "warm_up_s": 10, "window_s": 20}
    assert figures(fleet(regions=regions, days=days))["abroad_share"] > 0.1
    assert figures(fleet())["abroad_share"] == 0.0


def test_without_room_anywhere_requests_wait_and_are_served() -> None:
    days = {"hours": [12], "warm_up_s": 5, "window_s": 30}
    regions = {"only": {"verifiers": 2, "peak_sequences": 50}}
    found = figures(fleet(regions=regions, days=days, traffic={"arrivals": "closed"}))
    assert found["under_way"] == pytest.approx(50, rel=0.01)
    assert found["ttft_p50_ms"] > 500


def test_bad_links_and_missing_drafters_slow_down() -> None:
    base = fleet()
    worse = fleet(links={"bad_share": 0.3})
    without = fleet(drafters={"count": 0})
    times = [figures(asked, base)["tpot_mean_ms"] for asked in (base, worse, without)]
    assert times == sorted(times)
    assert times[2] > 1.7 * times[0]


def test_a_sequence_without_a_place_at_a_drafter_decodes_plainly() -> None:
    base = fleet()
    scarce = fleet(drafters={"count": 1, "max_sequences": 2})
    assert figures(base)["undrafted_share"] == 0.0
    assert figures(scarce, base)["undrafted_share"] > 0.5


def test_a_shared_drafter_takes_longer_for_more_sequences() -> None:
    asked = fleet()
    servers = Servers(asked, assumed(asked))
    loads = np.full(4, 8.0)
    alone = servers.slowness(loads, loads, Drafters(shared_by=1))
    together = servers.slowness(loads, 2 * loads, Drafters(shared_by=2))
    in_turn = servers.slowness(loads, 2 * loads, Drafters(shared_by=2, passes="in-turn"))
    assert alone == pytest.approx(np.ones(4))
    assert (together > alone).all()
    assert (in_turn > together).all()
    assert (in_turn <= 2 * alone + 1e-9).all()


def test_as_many_links_are_bad_as_the_file_says() -> None:
    asked = fleet(links={"bad_share": 0.1, "mean_bad_s": 2})
    faults = Faults(asked, 2000, np.random.default_rng(0))
    shares = []
    for _ in range(300):
        faults.step()
        shares.append(faults.bad.mean())
    assert np.mean(shares) == pytest.approx(0.1, abs=0.01)


@given(st.data())
def test_filling_is_choosing_the_least_loaded_one_by_one(data: st.DataObject) -> None:
    loads = data.draw(
        st.lists(st.one_of(st.integers(0, 6), st.just(ABSENT)), min_size=1, max_size=6)
    )
    arrivals, room = data.draw(st.integers(0, 15)), data.draw(st.integers(1, 9))
    counts = fill(np.array([loads]), np.array([arrivals]), room)[0]
    slowly = np.array(loads)
    for _ in range(arrivals):
        least = int(np.argmin(slowly))
        if slowly[least] < room:
            slowly[least] += 1
    assert sorted(loads + counts) == sorted(slowly)
    chosen = spread(counts[None], np.zeros(arrivals, dtype=np.int64), np.arange(len(loads))[None])
    assert np.array_equal(np.bincount(chosen[chosen >= 0], minlength=len(loads)), counts)


def test_the_example_is_as_large_as_it_says() -> None:
    asked = load(EXAMPLE)
    layout = lay_out(asked)
    assert len(layout.region_of) == 1000
    assert layout.drafter_count == 10_000
    assert asked.links.bad_share == 0.01


_REGION = "name: a\nregions: {b: {verifiers: 1, peak_sequences: 1}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nregions: {}\n", "regions"),
        ("name: a\nregions: {b: {verifiers: 1, peak_sequences: 1, odd: 2}}\n", "regions.b.odd"),
        (_REGION + "alternatives: {c: {drafters.odd: 1}}\n", "alternatives.c.drafters.odd"),
        (_REGION + "alternatives: {c: {drafters.count: -1}}\n", "drafters.count"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_the_field(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(file)


def test_findings_name_the_fewest_processes_that_are_as_fast() -> None:
    base = {"processes": 100, "shared_by": 1, "tpot_mean_ms": 10.0, "tpot_p99.9_ms": 20.0}
    compared = {
        "base": base,
        "own": base | {"processes": 50, "tpot_mean_ms": 10.1},
        "few": base | {"processes": 10, "tpot_mean_ms": 12.0},
        "shared": base | {"processes": 25, "shared_by": 4, "tpot_mean_ms": 10.15},
    }
    sentences = list(results.findings(compared))
    assert "50 processes" in sentences[0]
    assert "25 processes" in sentences[1]
    assert "few: mean time per token +20.0%" in sentences[3]


@pytest.mark.slow
@pytest.mark.parametrize(("acceptance", "round_trip_ms"), [(0.5, 5.0), (0.8, 0.4)], ids=str)
def test_it_agrees_with_the_engine_level_simulator(
    acceptance: float, round_trip_ms: float, tmp_path: Path
) -> None:
    """At loads between those at which rates are measured, over several verifiers and drafters."""
    rates = tmp_path / "rates.json"
    for verifiers, sequences, drafters in ((1, 5, 1), (1, 10, 1), (2, 20, 1), (1, 20, 4)):
        case = Case(acceptance, round_trip_ms, verifiers, sequences, drafters)
        row = compare(case, rates, max_sequences=24, processes=1)
        assert abs(row.error("tokens_per_s")) < 0.05, case
        assert abs(row.error("tpot_mean_ms")) < 0.05, case


@pytest.mark.slow
def test_it_agrees_with_poisson_arrivals_at_four_verifiers(tmp_path: Path) -> None:
    case = Case(0.8, 0.4, verifiers=4, load=12, arrivals="poisson")
    row = compare(case, tmp_path / "rates.json", max_sequences=24, processes=1)
    assert abs(row.error("tpot_mean_ms")) < 0.05
    assert abs(row.error("ttft_p50_ms")) < 0.1


@pytest.mark.slow
def test_measured_rates_are_kept_and_used_again(tmp_path: Path) -> None:
    asked = fleet(verifiers={"max_sequences": 2}, drafters={"count": 0})
    file = tmp_path / "rates.json"
    first = cells([asked], file, processes=1)
    changed = file.stat().st_mtime_ns
    assert cells([asked], file, processes=1) == first
    assert file.stat().st_mtime_ns == changed
    file.write_text("[]")
    with pytest.raises(ValueError, match="holds no measured rates"):
        cells([asked], file)
