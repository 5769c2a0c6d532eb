"""The pool in memory looks up the longest suffix first, new places before old, and is bounded."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.pools.memory import MemoryPool, NgramOptions

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def pool_of(text: list[int], **options: Any) -> MemoryPool:
    pool = MemoryPool(NgramOptions(**options), 10_000)
    pool.index(text, 0)
    return pool


def newest_by_search(text: list[int], size: int, length: int) -> list[int]:
    """Return what follows the longest known suffix: of its longest continuations the newest."""
    for n in range(min(size, len(text)), 0, -1):
        places = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]][-16:]
        if places:
            return max(([text[end : end + length] for end in reversed(places)]), key=len)
    return []


@given(texts, st.integers(1, 4), st.integers(1, 6))
def test_a_lookup_agrees_with_a_search_of_the_text(text: list[int], size: int, length: int) -> None:
    pool = pool_of(text, max_matching_ngram_size=size, max_draft_len=length)
    assert pool.continuation(text, length) == newest_by_search(text, size, length)


@given(texts, st.lists(st.integers(1, 5), max_size=10))
def test_indexing_in_pieces_equals_indexing_at_once(text: list[int], pieces: list[int]) -> None:
    whole = pool_of(text)
    grown = [text[0]]
    pool = MemoryPool(NgramOptions(), 10_000)
    pool.index(grown, 0)
    for piece in [*pieces, len(text)]:
        start = len(grown)
        grown += text[start : start + piece]
        pool.index(grown, start)
    assert grown == text
    assert pool.continuation(text, 8) == whole.continuation(text, 8)


@given(texts, st.integers(1, 4), st.integers(1, 6), st.integers(0, 4))
def test_shares_are_a_distribution_over_different_first_tokens(
    text: list[int], size: int, length: int, chosen: int
) -> None:
    pool = pool_of(text, max_matching_ngram_size=size, max_draft_len=length)
    share, others = pool.shares(text, length, chosen)
    firsts = [one.tokens[0] for one in others]
    assert len({chosen, *firsts}) == 1 + len(firsts)
    assert share + sum(one.confidences[0] for one in others) < 1
    assert all(0 < value < 1 for one in others for value in one.confidences)
    assert all(len(one.tokens) == len(one.confidences) <= length for one in others)
    known = set(firsts) | ({chosen} if share else set())
    followers = [text[i] for i in range(1, len(text)) if text[i - 1] == text[-1]]
    assert known <= set(followers)
    # With ten occurrences of a suffix, less than a tenth of the share is left for shorter suffixes,
    # and these are ignored.
    if len(followers) < 10:
        assert known == set(followers)


def test_shares_count_the_longest_suffix_first() -> None:
    pool = pool_of([3, 1, 2, 9, 1, 2, 9, 8, 2, 7, 1, 2])
    # 9 followed 1 2 both times. Once, 7 followed a 2 that had no 1 before it.
    share, [other] = pool.shares([1, 2], 2, 9)
    assert share == 2 / 3
    assert (other.tokens, other.confidences) == ([7, 1], [1 / 3 / 2, 1 / 2])


def test_the_least_recently_used_ngrams_are_evicted_first() -> None:
    pool = MemoryPool(NgramOptions(max_matching_ngram_size=1), 3)
    pool.index([1, 2, 3, 4], 0)  # the pool now knows 1, 2 and 3
    pool.index([1, 5, 6], 0)  # 1 is used again, and 5 needs room
    assert [pool.continuation([token], 1) for token in (1, 2, 3, 5)] == [[5], [], [4], [6]]
