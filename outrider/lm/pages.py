"""Page pool of the KV cache: which sequence holds which page, and which pages can be shared.

Works on token ids and page numbers only; the tensors are elsewhere.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass(eq=False, slots=True)
class KVSequence:
    """The pages of one sequence, in order.

    The cache holds keys and values of its first `num_computed_tokens` tokens.
    """

    pages: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    digests: list[bytes] = field(default_factory=list)
    """Block hashes of the leading pages that are cached for sharing. Nothing writes to these
    pages."""
    sent_page_count: int = 0
    """The number of leading pages that the sequence's row of a GPU's block table holds."""


class PagePool:
    """Hands out pages, and keeps pages of committed tokens so that later sequences can share them.

    A full page of committed tokens has a chained block hash: SHA-256 over the hash of the page
    before it (for the first page: of the salt) and the page's own token ids as little-endian
    uint32. Cached pages that no sequence holds stay findable until the pool needs them; the pool
    takes the least recently used page first. A sequence writes only beyond its
    `num_computed_tokens`, so nothing writes to a shared page.
    """

    def __init__(self, page_count: int, page_size: int, *, prefix_caching: bool = True) -> None:
        """Create `page_count` blank pages of `page_size` tokens each."""
        self.page_count = page_count
        self.page_size = page_size
        self._prefix_caching = prefix_caching
        self._holders = [0] * page_count
        # `_blank` is a heap: the lowest free pages are often neighbours, and attention reads
        # neighbouring pages in place.
        self._blank = list(range(page_count))
        self._by_digest: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free_count(self) -> int:
        """The number of pages that the pool could hand out now."""
        return len(self._blank) + len(self._idle)

    @property
    def used_count(self) -> int:
        """The number of pages that sequences hold."""
        return self.page_count - self.free_count

    @property
    def usage(self) -> float:
        """The share of the pages that sequences hold, 0 to 1."""
        return self.used_count / self.page_count

    def reserve(self, sequence: KVSequence, length: int) -> bool:
        """Give the sequence pages for `length` tokens.

        Return False and change nothing if too few pages are free.
        """
        missing = -(-length // self.page_size) - len(sequence.pages)
        if missing <= 0:
            return True
        if missing > self.free_count:
            return False
        for _ in range(missing):
            sequence.pages.append(self._take())
        return True

    def room(self, sequence: KVSequence) -> int:
        """Return the largest length for which `reserve` can succeed now."""
        return (len(sequence.pages) + self.free_count) * self.page_size

    def fork(self, sequence: KVSequence, length: int) -> KVSequence:
        """Return a new sequence that shares the full pages of the first `length` tokens.

        The caller computes the tokens after those pages. While both sequences live, `sequence` must
        not be rewound into the shared pages and then continue.
        """
        full = min(length, sequence.num_computed_tokens) // self.page_size
        for page in sequence.pages[:full]:
            self._holders[page] += 1
        return KVSequence(sequence.pages[:full], full * self.page_size, sequence.digests[:full])

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Rewind the sequence to `length` tokens and free the pages after them; copy nothing.

        Other sequences may be reading a cached page. So a rewind into a cached page goes back to
        the page's beginning, and the tokens from there on are computed again into a page of the
        sequence's own.
        """
        cached = length // self.page_size
        if cached < len(sequence.digests):
            length = cached * self.page_size
            del sequence.digests[cached:]
        if length < sequence.num_computed_tokens:
            sequence.num_computed_tokens = length
        keep = -(-length // self.page_size)
        # Free the pages backwards, so that the pool evicts the end of a cached prefix before its
        # beginning.
        while len(sequence.pages) > keep:
            self._give_back(sequence.pages.pop())
        sequence.sent_page_count = min(sequence.sent_page_count, keep)

    def free(self, sequence: KVSequence) -> None:
        """Free all pages of the sequence."""
        self.truncate(sequence, 0)

    def match_prefix(
        self, sequence: KVSequence, token_ids: Sequence[int], salt: str, limit: int | None = None
    ) -> int:
        """Start an empty sequence on the cached pages of the longest known prefix of `token_ids`.

        Return the number of tokens covered. At least the last token remains to be computed, because
        the caller wants its logits; with a `limit`, all tokens from index `limit` on remain. Raises
        ValueError if the sequence already has pages.
        """
        if sequence.pages:
            raise ValueError("only an empty sequence can start on a cached prefix")
        if not self._prefix_caching:
            return 0
        most = len(token_ids) - 1
        if limit is not None:
            most = min(most, limit)
        for i in range(most // self.page_size):
            digest = self._digest(sequence.digests, token_ids, i, salt)
            page = self._by_digest.get(digest)
            if page is None:
                break
            self._idle.pop(page, None)
            self._holders[page] += 1
            sequence.pages.append(page)
            sequence.digests.append(digest)
        sequence.num_computed_tokens = len(sequence.digests) * self.page_size
        return sequence.num_computed_tokens

    def known_pages(self, hashes: list[bytes], token_ids: Sequence[int], salt: str) -> int:
        """Return how many full pages of `token_ids` are cached.

        `match_prefix` finds at most this many pages. `hashes` belongs to one sequence with one
        salt. It is empty at first, and keeps the block hashes from call to call.
        """
        for i in range(len(hashes), len(token_ids) // self.page_size):
            hashes.append(self._digest(hashes, token_ids, i, salt))
        return sum(map(self._by_digest.__contains__, hashes))

    def cache_pages(self, sequence: KVSequence, token_ids: Sequence[int], salt: str) -> None:
        """Make the full pages of committed `token_ids` findable.

        Pages that were cached before cost nothing.
        """
        if not self._prefix_caching:
            return
        cached = len(sequence.digests)
        if sequence.num_computed_tokens < (cached + 1) * self.page_size:
            return
        full = min(sequence.num_computed_tokens, len(token_ids)) // self.page_size
        for i in range(cached, full):
            digest = self._digest(sequence.digests, token_ids, i, salt)
            sequence.digests.append(digest)
            if digest not in self._by_digest:
                self._by_digest[digest] = sequence.pages[i]
                self._digest_of[sequence.pages[i]] = digest

    def check_integrity(self, sequences: Iterable[KVSequence] = ()) -> None:
        """Check that each page is blank, idle, or held by as many `sequences` as the pool counted.

        Raises RuntimeError otherwise.
        """
        held = [0] * self.page_count
        for sequence in sequences:
            for page in sequence.pages:
                held[page] += 1
        if held != self._holders:
            raise RuntimeError("page holder counts do not match the sequences")
        blank = set(self._blank)
        idle = set(self._idle)
        unheld = {page for page, count in enumerate(held) if count == 0}
        if blank & idle or blank | idle != unheld or len(blank) != len(self._blank):
            raise RuntimeError("a page is lost, or free twice")
        inverted = {page: digest for digest, page in self._by_digest.items()}
        if inverted != self._digest_of or not idle <= self._digest_of.keys():
            raise RuntimeError("the index of cached pages is inconsistent")

    def _take(self) -> int:
        if self._blank:
            page = heappop(self._blank)
        else:
            page, _ = self._idle.popitem(last=False)
            del self._by_digest[self._digest_of.pop(page)]
        self._holders[page] = 1
        return page

    def _give_back(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] > 0:
            return
        if page in self._digest_of:
            self._idle[page] = None
        else:
            heappush(self._blank, page)

    def _digest(
        self, before: Sequence[bytes], token_ids: Sequence[int], index: int, salt: str
    ) -> bytes:
        """Return the block hash of page `index`, given the hashes of the pages before it."""
        parent = before[-1] if before else hashlib.sha256(salt.encode()).digest()
        block = array("I", token_ids[index * self.page_size : (index + 1) * self.page_size])
        return hashlib.sha256(parent + block.tobytes()).digest()
