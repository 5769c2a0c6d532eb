"""`outrider lab profile head-round` runs whole rounds of a head, in process and by stream."""

import pytest
import torch

from outrider_bench.commands.profile import main
from outrider_bench.head_round import HeadRoundSettings, Round, measure, table

HIDDEN, COMMITTED = 64, 2
SIZES = {"hidden": HIDDEN, "intermediate": 96, "heads": 4, "kv_heads": 2}
SMALL = {**SIZES, "vocab": 200, "draft_vocab": 50, "context": 20, "repeats": 2}


@pytest.fixture(scope="module")
def rounds() -> list[Round]:
    settings = HeadRoundSettings.model_validate(
        {**SMALL, "batch": [1, 3], "committed": COMMITTED, "threads": 1}
    )
    return measure(settings, torch.device("cpu"))


def test_all_batches_ways_and_shapes_are_measured(rounds: list[Round]) -> None:
    found = [(each.batch, each.shape, each.way) for each in rounds]
    ways = [
        ("chain", "in process"),
        ("chain", "stream"),
        ("tree", "in process"),
        ("tree", "stream"),
    ]
    assert found == [(batch, *way) for batch in (1, 3) for way in ways]
    assert all(part.seconds > 0 for each in rounds for part in each.parts)


def test_a_message_has_the_states_of_all_committed_tokens_and_little_else(
    rounds: list[Round],
) -> None:
    for each in rounds:
        assert each.feature_bytes == 3 * HIDDEN * 2
        features = each.batch * COMMITTED * each.feature_bytes
        if each.way == "stream":
            assert features < each.sent_bytes < features + 40 * each.batch
        else:
            assert each.sent_bytes == 0


def test_the_stream_copies_the_states_more_often(rounds: list[Round]) -> None:
    assert {each.way: each.copies for each in rounds} == {"in process": 3, "stream": 10}


def test_the_table_has_a_line_for_each_round(rounds: list[Round]) -> None:
    lines = table(rounds)
    assert len(lines) == 2 + len(rounds)
    assert lines[2].startswith("| 1 | chain | in process | 384 | 0 | 3 | ")
    assert len({line.count("|") for line in lines}) == 1


def test_sizes_that_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["head-round", "--hidden", "100", "--heads", "3"])
    assert "heads must divide hidden" in capsys.readouterr().err
