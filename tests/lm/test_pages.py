"""The pool loses no page, gives each page one writer, and shares pages only between equal salts."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from outrider.lm.pages import KVSequence, PagePool

PAGE_SIZE = 4
# Four full pages and half a page.
TEXT = list(range(100, 118))


def computed(pool: PagePool, tokens: list[int], salt: str = "") -> KVSequence:
    """Return a sequence whose whole text is computed and cached for sharing."""
    sequence = KVSequence()
    pool.match_prefix(sequence, tokens, salt)
    assert pool.reserve(sequence, len(tokens))
    sequence.num_computed_tokens = len(tokens)
    pool.cache_pages(sequence, tokens, salt)
    return sequence


def test_the_beginning_of_a_prefix_is_evicted_last() -> None:
    pool = PagePool(5, PAGE_SIZE)
    pool.free(computed(pool, TEXT))
    other = KVSequence()
    pool.reserve(other, 3 * PAGE_SIZE)
    assert pool.match_prefix(KVSequence(), TEXT, "") == 8


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = PagePool(4, PAGE_SIZE)
    old = [1, 2, 3, 4, 0]
    used = [5, 6, 7, 8, 0]
    pool.free(computed(pool, old))
    pool.free(computed(pool, used))
    pool.free(computed(pool, old))
    pool.reserve(KVSequence(), 3 * PAGE_SIZE)
    assert pool.match_prefix(KVSequence(), used, "") == 0
    assert pool.match_prefix(KVSequence(), old, "") == PAGE_SIZE


def test_tenants_never_share() -> None:
    pool = PagePool(16, PAGE_SIZE)
    computed(pool, TEXT, "tenant-a")
    assert pool.match_prefix(KVSequence(), TEXT, "tenant-b") == 0
    assert pool.match_prefix(KVSequence(), TEXT, "") == 0
    assert pool.match_prefix(KVSequence(), TEXT, "tenant-a") == 16


def test_equal_pages_behind_different_pages_are_not_shared() -> None:
    pool = PagePool(16, PAGE_SIZE)
    one = [*range(16), 99]
    other = [*range(4), 50, 51, 52, 53, *range(8, 16), 99]
    computed(pool, one)
    own = computed(pool, other)
    reader = KVSequence()
    assert pool.match_prefix(reader, other, "") == 16
    assert reader.pages == own.pages[:4]


def test_a_rewind_into_a_shared_page_leaves_the_page_to_its_reader() -> None:
    pool = PagePool(16, PAGE_SIZE)
    writer = computed(pool, TEXT)
    reader = KVSequence()
    pool.match_prefix(reader, TEXT, "")
    pool.truncate(writer, 10)
    assert writer.num_computed_tokens == 8
    pool.reserve(writer, 12)
    assert writer.pages[2] != reader.pages[2]
    pool.check_integrity([writer, reader])


def test_only_committed_and_computed_pages_are_cached() -> None:
    pool = PagePool(16, PAGE_SIZE)
    sequence = KVSequence()
    pool.reserve(sequence, 16)
    sequence.num_computed_tokens = 7
    pool.cache_pages(sequence, TEXT, "")
    assert pool.match_prefix(KVSequence(), TEXT, "") == 4, "the second page is not yet computed"
    sequence.num_computed_tokens = 16
    pool.cache_pages(sequence, TEXT[:9], "")
    assert pool.match_prefix(KVSequence(), TEXT, "") == 8, "the third page is not yet committed"


@pytest.mark.parametrize("damage", ["lost", "twice", "miscounted"])
def test_check_integrity_detects_a_page_that_is(damage: str) -> None:
    pool = PagePool(4, PAGE_SIZE)
    sequence = KVSequence()
    pool.reserve(sequence, 5)
    if damage == "lost":
        pool._blank.pop()
    elif damage == "twice":
        pool._blank.append(pool._blank[0])
    else:
        sequence.pages.pop()
    with pytest.raises(RuntimeError, match="page"):
        pool.check_integrity([sequence])


class PoolMachine(RuleBasedStateMachine):
    """Interleaves sequences and remembers which tokens were written to each page."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7, 2)
        self.live: dict[KVSequence, tuple[list[int], str]] = {}
        self.written: dict[tuple[int, int], tuple[list[int], str]] = {}

    @rule(
        target=sequences,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from(["", "a"]),
    )
    def start(self, tokens: list[int], salt: str) -> KVSequence:
        sequence = KVSequence()
        covered = self.pool.match_prefix(sequence, tokens, salt)
        assert covered == sequence.num_computed_tokens < len(tokens)
        self.live[sequence] = (tokens, salt)
        return sequence

    @rule(sequence=sequences, count=st.integers(1, 5))
    def compute(self, sequence: KVSequence, count: int) -> None:
        """Write more of the text, as a forward does."""
        tokens, salt = self.live[sequence]
        end = min(len(tokens), sequence.num_computed_tokens + count)
        free = self.pool.free_count
        before = list(sequence.pages)
        if not self.pool.reserve(sequence, end):
            assert (self.pool.free_count, sequence.pages) == (free, before)
            return
        for position in range(sequence.num_computed_tokens, end):
            place = sequence.pages[position // 2], position % 2
            self.written[place] = tokens[: position + 1], salt
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, end)

    @rule(
        sequence=sequences, length=st.integers(0, 9), tail=st.lists(st.integers(0, 1), max_size=4)
    )
    def rewind_and_continue_differently(
        self, sequence: KVSequence, length: int, tail: list[int]
    ) -> None:
        self.pool.truncate(sequence, length)
        assert sequence.num_computed_tokens <= length
        tokens, salt = self.live[sequence]
        self.live[sequence] = ([*tokens[: max(length, sequence.num_computed_tokens)], *tail], salt)

    @rule(sequence=sequences, committed=st.integers(0, 9))
    def cache(self, sequence: KVSequence, committed: int) -> None:
        tokens, salt = self.live[sequence]
        self.pool.cache_pages(sequence, tokens[:committed], salt)

    @rule(sequence=consumes(sequences))
    def free(self, sequence: KVSequence) -> None:
        self.pool.free(sequence)
        assert (sequence.pages, sequence.num_computed_tokens) == ([], 0)
        del self.live[sequence]

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        self.pool.check_integrity(self.live)

    @invariant()
    def every_sequence_finds_its_own_keys(self) -> None:
        for sequence, (tokens, salt) in self.live.items():
            for position in range(sequence.num_computed_tokens):
                place = sequence.pages[position // 2], position % 2
                assert self.written[place] == (tokens[: position + 1], salt)


TestAnyInterleaving = PoolMachine.TestCase
TestAnyInterleaving.settings = settings(max_examples=150, stateful_step_count=40)
