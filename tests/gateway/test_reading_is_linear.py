"""Reading an answer takes time in proportion to its length, in whatever pieces it comes."""

from __future__ import annotations

import time

import pytest

from gateway.text.text_stream import StopScanner
from gateway.tools.formats import FORMATS
from gateway.tools.reader import AnswerReader, Reading

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
OBJECTS = {"type": "object", "properties": {"a": {"type": "array"}}}
COUNT = 15_000
QWEN = "<tool_call>\n<function=f>\n<parameter=a>"
CASES = {
    "a thought of line breaks": ("qwen_3", SCHEMA, "<think>so", "\n"),
    "a thought of marks": ("qwen_3", SCHEMA, "<think>", '<tool_call>\n{"name": "'),
    "blank content": ("qwen_3", SCHEMA, "", " "),
    "content that begins marks": ("llama", SCHEMA, "", '{"name": "'),
    "a text in tags": ("qwen_3_coder", SCHEMA, QWEN, "</param"),
    "a text of GLM": (
        "glm_4_7",
        SCHEMA,
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>",
        "</arg",
    ),
    "blanks before a value": ("qwen_3_coder", OBJECTS, QWEN, "\n"),
    "JSON in tags": ("qwen_3_coder", OBJECTS, f'{QWEN}["', "</parameter>"),
    "a text of Gemma": ("gemma_4", SCHEMA, '<|tool_call>call:f{a:<|"|>', "<|"),
    "numbers of Gemma": ("gemma_4", SCHEMA, "<|tool_call>call:f{a:[", "1,"),
    "JSON": ("qwen_3", SCHEMA, '<tool_call>\n{"name": "f", "arguments": ', '{"a":'),
    "blanks after a call": ("llama", SCHEMA, '{"name": "f", "parameters": {}', " "),
}


def seconds(name: str, count: int) -> float:
    """Return the shortest of three times, since another process may disturb a try."""
    return min(_seconds(name, count) for _ in range(3))


def _seconds(name: str, count: int) -> float:
    form, schema, begin, piece = CASES[name]
    own = FORMATS[form]
    reader = AnswerReader(
        Reading(own, {"f": schema}, own.thought, is_forced=False, held=frozenset("f"))
    )
    reader.push(begin)
    started = time.thread_time()
    for _ in range(count):
        reader.push(piece)
    reader.finish()
    return time.thread_time() - started


@pytest.mark.parametrize("name", CASES)
def test_twice_the_pieces_take_about_twice_the_time(name: str) -> None:
    # When reading had a quadratic part, four times the pieces took over ten times the time.
    assert seconds(name, COUNT) < 8 * seconds(name, COUNT // 4)


def test_stop_strings_are_looked_for_in_linear_time() -> None:
    def scan(count: int) -> float:
        scanner = StopScanner(["a" * 256, "b"])
        started = time.thread_time()
        for _ in range(count):
            scanner.push("a" * 3 + "c")
        return time.thread_time() - started

    longer, shorter = (min(scan(count) for _ in range(3)) for count in (COUNT, COUNT // 4))
    assert longer < 8 * shorter
