"""The whitespace at a JSON text's joints, such as commas, is guessed from earlier joints."""

from __future__ import annotations

import json

import pytest

from drafter_svc.families.json_whitespace import AfterThought, Layout, Place
from outrider.grammar.kinds import FreeThought

VALUE = {"a": 1, "b": [2, {"c": None}], "d": {"e": 'x, y: {z} \\" q'}, "f": []}


def layout_of(text: str) -> Layout:
    layout = Layout()
    layout.read(text.encode())
    return layout


def guessed(layout: Layout, text: str, following: str) -> list[str]:
    place = Place.after(text.encode())
    return [whitespace.decode() for whitespace, _ in layout.guesses(place, ord(following))]


@pytest.mark.parametrize("options", [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}])
def test_behind_a_few_joints_the_whitespace_of_json_dumps_is_known(
    options: dict[str, object],
) -> None:
    text = json.dumps(VALUE, **options)
    solid = [i for i, letter in enumerate(text) if not letter.isspace()]
    start = text.index('"b"')
    outside = [i for i in solid if i > start and text[:i].replace('\\"', "").count('"') % 2 == 0]
    for i in outside:
        before = text[:i].rstrip()
        if before[-1].isalnum() and text[i].isalnum():
            continue
        layout = layout_of(before)
        first, *_ = guessed(layout, before, text[i])
        assert before + first + text[i] == text[: i + 1]


def test_an_unknown_layout_is_guessed_spaced_first_then_compact_and_indented() -> None:
    layout = layout_of('{"a"')
    assert guessed(layout, '{"a"', ":") == [""]
    assert guessed(layout, '{"a":', "1") == [" ", ""]
    assert guessed(Layout(), "{", '"') == ["", "\n  ", "\n    "]


def test_a_layout_unlike_all_is_guessed_only_where_it_was_seen() -> None:
    layout = layout_of('{   "a" :1')
    assert guessed(layout, '{   "a" :1', "}") == []
    assert guessed(layout, '{   "a" :1, "b"', ":") == [" "]


def test_whitespace_that_is_there_is_not_guessed_again() -> None:
    layout = layout_of('{"a": 1, "b"')
    assert guessed(layout, '{"a": 1, "b": ', "2") == [""]
    assert guessed(layout, '{"a": 1, "b":  ', "2") == []


def test_the_trust_in_a_joint_falls_with_each_change_and_comes_back() -> None:
    def trust(layout: Layout) -> float:
        [(_, chance)] = layout.guesses(Place.after(b'"x":'), ord("1"))
        return chance

    found = [trust(layout_of('{"a": 1' + text)) for text in ("", ', "b":2', ', "b":2, "c":   3')]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.3
    text = ', "b":2, "c":   3' + ', "d":   4' * 3
    assert trust(layout_of('{"a": 1' + text)) > 0.8


def test_a_quote_in_the_text_before_hides_no_joint() -> None:
    before = 'Then "call it.\n'
    assert guessed(layout_of(before + '{"a":1'), '{"b":', "2") == [""]


def test_a_json_text_behind_words_has_the_usual_layouts() -> None:
    layout = layout_of('So\n</think>\n\n{"a"')
    assert guessed(layout, '{"a":', "1") == [" ", ""]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("thought", "text", "answer"),
    [
        (None, "<t>a</t>b", "<t>a</t>b"),
        (FreeThought("", "</t>"), "a</</t>b</t>", "b</t>"),
        (FreeThought("<t>", "</t>"), "<t></t>b", "b"),
        (FreeThought("<t>", "</t>"), "{}</t>b", "{}</t>b"),
        (FreeThought("<t>", "</t>"), "<a</t>b", "<a</t>b"),
        (FreeThought("<t>", "</t>"), "<t>a</t", ""),
    ],
)
def test_a_thought_is_left_out_however_its_text_is_cut(
    thought: FreeThought | None, text: str, answer: str, size: int
) -> None:
    reader = AfterThought(thought)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert "".join(reader.read(piece.encode()).decode() for piece in pieces) == answer
