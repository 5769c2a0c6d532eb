"""A report's figures equal figures that were computed by hand."""

from pathlib import Path

import pytest

from outrider_bench.experiment.profile_record import Conditions
from outrider_bench.experiment.records import DRAFTED, PLAIN, Folder, LinkTraffic, Measurement
from outrider_bench.experiment.report.answers import answers
from outrider_bench.experiment.report.figures import figures_of, groups_of
from outrider_bench.experiment.report.results import Spread, read
from outrider_bench.experiment.report.tables import tables
from outrider_bench.experiment.spec import Experiment
from outrider_bench.sample import Sample
from tests.experiment.made_up_profile import made_up_profile

COUNTERS = {
    "generation_tokens": 100.0,
    "step_sequences_sum": 40.0,
    "step_seconds_count": 20.0,
    "spec_decode_num_drafts": 30.0,
    "spec_decode_num_draft_tokens": 120.0,
    "spec_decode_num_accepted_tokens": 60.0,
    "draft_lookups.chain": 20.0,
    "draft_lookups.branch": 10.0,
    "draft_lookups.late": 6.0,
    "draft_lookups.miss": 4.0,
    "wasted_tokens": 50.0,
    "draft_bytes": 3000.0,
    "step_phase_seconds.forward": 0.2,
    "step_phase_seconds.wait": 0.1,
    "step_phase_seconds.pack": 0.02,
}


SPEC = "spec_decode_num"
APART = {
    # The first token of 24 of 30 drafts was accepted, and so on.
    f"{SPEC}_accepted_tokens_per_pos.0": 24.0,
    f"{SPEC}_accepted_tokens_per_pos.1": 21.0,
    f"{SPEC}_accepted_tokens_per_pos.2": 15.0,
    f"ngram:{SPEC}_drafts": 10.0,
    f"ngram:{SPEC}_draft_tokens": 40.0,
    f"ngram:{SPEC}_accepted_tokens": 10.0,
    f"ngram:{SPEC}_accepted_tokens_per_pos.0": 4.0,
}


def test_acceptance_is_told_by_position_family_and_kind() -> None:
    one = Sample(100, 2.0, counters=COUNTERS | APART)
    # Two requests for code: three drafts of four tokens each, of which 0, 2 and 2 were accepted.
    one.count_drafts("code", 4, [1])
    one.count_drafts("code", 8, [0, 0, 2])
    one.count_drafts("chat", 4, [1, 0, 0])
    found = figures_of(Measurement(DRAFTED, one))
    assert [found[f"accepted_at_{i}"] for i in (1, 2, 3)] == pytest.approx([0.8, 0.7, 0.5])
    assert found["family_ngram_acceptance"] == pytest.approx(0.25)
    assert found["family_ngram_accepted_length"] == pytest.approx(2.0)
    assert found["family_ngram_accepted_at_1"] == pytest.approx(0.4)
    assert found["kind_code_acceptance"] == pytest.approx(4 / 12)
    assert found["kind_code_accepted_at_2"] == pytest.approx(2 / 3)
    assert found["kind_chat_acceptance"] == 0.0
    assert groups_of(found) == ["family_ngram", "kind_code", "kind_chat"]


def sample(tokens: int = 100, seconds: float = 2.0) -> Sample:
    return Sample(tokens, seconds, [0.01, 0.03], [0.02, 0.04], dict(COUNTERS))


def run(path: Path, rates: dict[str, list[tuple[float, float]]]) -> Folder:
    """Return the folder of a run that sweeps the round trip.

    `rates` maps a cell to a pair (plain, drafted) of tokens/s for each repetition.
    """
    settings = {
        "name": "hand-made",
        "drafters": {"near": {"link": "wire"}},
        "links": {"wire": {}},
        "use": ["near"],
        "sweep": {"links.wire.round_trip_ms": [0, 10]},
    }
    experiment = Experiment.model_validate(settings)
    folder = Folder(path)
    folder.begin({"experiment": experiment.model_dump(mode="json")})
    for cell, pairs in rates.items():
        for number, pair in enumerate(pairs):
            for way, rate in zip((PLAIN, DRAFTED), pair, strict=True):
                if rate:
                    folder.save(cell, number, Measurement(way, Sample(int(rate), 1.0)))
    return folder


def test_drafts_have_vllms_definitions() -> None:
    figures = figures_of(Measurement(DRAFTED, sample()))
    assert figures["acceptance"] == 0.5
    assert figures["accepted_length"] == 3.0
    assert figures["tokens_per_forward"] == 2.5
    assert figures["accepted_per_forward"] == 1.5
    assert figures["wasted_per_token"] == 0.5
    assert figures["draft_bytes_per_token"] == 30.0


def test_lookups_are_shares_of_all_lookups() -> None:
    figures = figures_of(Measurement(DRAFTED, sample()))
    shares = [figures[f"lookup_{result}"] for result in ("chain", "branch", "late", "miss")]
    assert shares == [0.5, 0.25, 0.15, 0.1]


def test_latencies_are_percentiles_over_requests_in_ms() -> None:
    figures = figures_of(Measurement(DRAFTED, sample()))
    assert figures["ttft_p50_ms"] == pytest.approx(20.0)
    assert figures["tpot_p50_ms"] == pytest.approx(30.0)
    assert figures["tpot_p99_ms"] == pytest.approx(39.8)


def test_links_and_processors_are_for_each_token() -> None:
    measured = Measurement(
        DRAFTED,
        sample(),
        cpu_s={"verifier-1": 1.5, "near": 0.5},
        links={"wire": LinkTraffic(up_bytes=2000, down_bytes=500)},
    )
    figures = figures_of(measured)
    assert figures["link_wire_up_bytes_per_token"] == 20.0
    assert figures["link_wire_down_bytes_per_token"] == 5.0
    assert figures["cpu_near_ms_per_token"] == 5.0
    assert figures["cpu_ms_per_token"] == 20.0


def test_a_figure_without_its_counters_is_absent() -> None:
    figures = figures_of(Measurement(PLAIN, Sample(10, 1.0)))
    assert figures == {"tokens_per_s": 10.0}


def test_ratios_are_taken_within_a_repetition(tmp_path: Path) -> None:
    near = [(100.0, 200.0), (50.0, 100.0), (100.0, 210.0)]
    results = read(run(tmp_path, {"round_trip_ms=0": near}))
    spread = results.spread(results.cells[0], "measured", DRAFTED, "times_plain")
    assert spread == Spread(2.0, 2.0, 2.1, 3)
    assert spread.words() == "2.00 (2.00–2.10)"


@pytest.mark.parametrize(
    ("drafted", "shows"),
    [
        ([110, 120, 130], "faster"),
        ([99, 120, 130], ""),
        ([80, 90, 99], "slower"),
        ([80, 90, 101], ""),
        ([130], ""),
    ],
)
def test_only_an_interval_without_1_shows_a_difference(
    drafted: list[float], shows: str, tmp_path: Path
) -> None:
    results = read(run(tmp_path, {"round_trip_ms=0": [(100, rate) for rate in drafted]}))
    spread = results.spread(results.cells[0], "measured", DRAFTED, "times_plain")
    assert spread is not None
    assert spread.shows == shows
    said = " ".join(answers(results))
    assert f"{int(shows == 'faster')} of 1 cells are faster than plain decoding" in said
    assert f"{int(shows == 'slower')} of 1 cells are slower" in said


def test_a_speed_beyond_its_tokens_per_forward_is_disturbed(tmp_path: Path) -> None:
    folder = run(tmp_path, {})
    for cell, seconds in (("round_trip_ms=0", 0.35), ("round_trip_ms=10", 0.45)):
        for number in range(3):
            plain = Sample(100, 1.0, counters={"generation_tokens": 9.0, "step_sequences_sum": 9.0})
            # 2.5 tokens in a forward.
            drafted = sample(100, seconds)
            folder.save(cell, number, Measurement(PLAIN, plain))
            folder.save(cell, number, Measurement(DRAFTED, drafted))
    results = read(folder)
    assert [results.is_disturbed(cell, "measured") for cell in results.cells] == [True, False]
    said = answers(results)
    assert any(line.startswith("Disturbed, ") and "round_trip_ms 0." in line for line in said)
    assert "1 of 1 cells are faster than plain decoding." in said
    [line, _] = next(table for table in tables(results) if table.title == "Speed").lines
    assert "2.86 (2.86–2.86) disturbed" in line


def test_a_report_repeats_the_load_of_the_profile_that_predicted(tmp_path: Path) -> None:
    folder = run(tmp_path, {"round_trip_ms=0": [(100, 200)]})
    conditions = Conditions(load_averages=(0.1, 7.4), spread=1.8)
    profile = made_up_profile().model_copy(update={"conditions": conditions})
    folder.note_costs(profile.described)
    [said] = [line for line in answers(read(folder)) if line.startswith("Costs of predictions: ")]
    assert "7.4 at the end" in said
    assert "1.80 ×" in said


def test_errors_of_predictions_are_of_medians_by_cell_and_way(tmp_path: Path) -> None:
    folder = run(tmp_path, {"round_trip_ms=0": [(100.0, 200.0), (110.0, 220.0), (90.0, 180.0)]})
    for way, rate in ((PLAIN, 98), (DRAFTED, 220)):
        folder.save("round_trip_ms=0", 0, Measurement(way, Sample(rate, 1.0)), predicted=True)
    said = answers(read(folder))
    assert "Predictions of 2 speeds are off by 6.0 % in the median and 10.0 % at worst." in said
