"""Long lists are written as JSON in pieces, which join to the JSON of the whole list."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.http.long_json import LongList, written

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(_JSON)
async def test_a_value_is_written_as_by_the_library(value: Any) -> None:
    compact = json.dumps(value, separators=(",", ":")).encode()
    assert await written(value) == compact


@given(st.integers(0, 1000))
async def test_a_long_list_is_written_as_a_list(count: int) -> None:
    squares = LongList(lambda number: {"n": number}, range(count))
    answer = {"choices": [{"list": squares}, {"list": None}]}
    assert json.loads(await written(answer)) == {
        "choices": [{"list": [{"n": number} for number in range(count)]}, {"list": None}]
    }
