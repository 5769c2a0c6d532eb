"""The load of an experiment reads its figures from streamed answers."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_bench.experiment.load import Played, _Answer, _events, _read, digest
from outrider_bench.experiment.traffic import Request
from outrider_bench.prompts import GRAMMARS
from outrider_bench.sample import Sample

_EVENTS = [
    {"choices": [{"text": f"wörd {i}\n"}], "usage": {"completion_tokens": i}} for i in range(1, 6)
]
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    + b"".join(b"data: " + json.dumps(event).encode() + b"\r\n\r\n" for event in _EVENTS)
    + b"data: [DONE]\r\n\r\n"
)


@given(st.lists(st.integers(0, len(_STREAM)), max_size=8))
def test_events_are_read_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(_STREAM)]
    blocks = [(float(i), _STREAM[a:b]) for i, (a, b) in enumerate(itertools.pairwise(places))]
    found = _events(blocks)
    assert [event for _, event in found] == _EVENTS
    assert sorted(at for at, _ in found) == [at for at, _ in found]


def _played(*texts: str) -> Played:
    return Played(Sample(0, 1.0), [*texts], [])


def test_digests_differ_when_a_text_or_its_place_does() -> None:
    digests = {
        digest(_played("a", "b")),
        digest(_played("b", "a")),
        digest(_played("ab")),
    }
    assert len(digests) == 3


def test_drafts_are_counted_by_the_kind_of_prompt() -> None:
    drafts = {"num_spec_steps": 3, "num_draft_tokens": 9, "acceptance_histogram": [1, 0, 2, 0]}
    last = {"usage": {"completion_tokens": 5}, "metrics": {"speculative_decoding": drafts}}
    stream = b"data: " + json.dumps(last).encode() + b"\n"
    played = _played()
    _read(Request("law", [1], 5, None), _Answer(0.0, [(1.0, stream)]), 0.0, played)
    per_position = "spec_decode_num_accepted_tokens_per_pos"
    assert played.sample.by_kind == {
        "law": {
            "spec_decode_num_drafts": 3.0,
            "spec_decode_num_draft_tokens": 9.0,
            "spec_decode_num_accepted_tokens": 4.0,
            f"{per_position}.0": 2.0,
            f"{per_position}.1": 2.0,
            f"{per_position}.2": 0.0,
        }
    }


@pytest.mark.parametrize(
    ("kind", "wanted", "is_error"),
    [("json", 5, False), ("json", 6, True), ("schema", 6, False), ("schema", 4, True)],
)
def test_only_an_answer_with_a_grammar_may_end_early(
    kind: str, wanted: int, is_error: bool
) -> None:
    played = _played()
    answer = _Answer(0.0, [(1.0, _STREAM)])
    asked = Request(kind, [1], wanted, None, GRAMMARS.get(kind))
    _read(asked, answer, 0.0, played)
    assert bool(played.errors) is is_error
    # If answers may end early, only an answer that is too long is wrong.
    free = _played()
    _read(asked, answer, 0.0, free, may_end=True)
    assert bool(free.errors) is (wanted < 5)
