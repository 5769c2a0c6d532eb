"""Pages of the KV cache: who holds which, and which can be shared. Knows token ids and page numbers; not tensors."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass(eq=False, slots=True)
class KVSequence:
    """One sequence's pages, in order. `length` tokens have their keys and values there."""

    pages: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    digests: list[bytes] = field(default_factory=list)
    """Block hashes of the leading pages that are published or shared; those are never written again."""


class PagePool:
    """Hands out pages, and keeps those of committed prompts for whoever comes with the same beginning.

    A full page of committed tokens is known by its chained block hash: SHA-256 over the hash of the page before (of the salt, for
    the first) and its token ids as little-endian uint32. Pages nobody holds stay findable until they are needed, the least
    recently used going first. Shared pages are never written, since a sequence writes only behind its `length`.
    """

    def __init__(self, page_count: int, page_size: int, *, prefix_caching: bool = True) -> None:
        self.page_count = page_count
        self.page_size = page_size
        self._prefix_caching = prefix_caching
        self._holders = [0] * page_count
        # A heap: whoever is given the lowest free pages often gets neighbours, which attention need not gather.
        self._blank = list(range(page_count))
        self._by_digest: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free_count(self) -> int:
        """Pages that could be handed out now."""
        return len(self._blank) + len(self._idle)

    @property
    def used_count(self) -> int:
        """Pages that some sequence holds."""
        return self.page_count - self.free_count

    def reserve(self, sequence: KVSequence, length: int) -> bool:
        """Give the sequence pages for `length` tokens; False, and nothing has changed, when there are not enough."""
        missing = -(-length // self.page_size) - len(sequence.pages)
        if missing <= 0:
            return True
        if missing > self.free_count:
            return False
        for _ in range(missing):
            sequence.pages.append(self._take())
        return True

    def fork(self, sequence: KVSequence, length: int) -> KVSequence:
        """A sequence that shares the full pages of the first `length` tokens; the rest is for it to compute.

        As long as both live, the first must not be rewound to within those pages and go on.
        """
        full = min(length, sequence.num_computed_tokens) // self.page_size
        for page in sequence.pages[:full]:
            self._holders[page] += 1
        return KVSequence(sequence.pages[:full], full * self.page_size, sequence.digests[:full])

    def truncate(self, sequence: KVSequence, length: int) -> None:
        """Rewind to `length` tokens and give back the pages behind them; nothing is copied.

        A rewind to within a published page goes on to that page's beginning, since others may be reading the page.
        """
        published = length // self.page_size
        if published < len(sequence.digests):
            length = published * self.page_size
            del sequence.digests[published:]
        if length < sequence.num_computed_tokens:
            sequence.num_computed_tokens = length
        keep = -(-length // self.page_size)
        # Backwards, so that of a cached prefix the end is forgotten before the beginning.
        while len(sequence.pages) > keep:
            self._give_back(sequence.pages.pop())

    def free(self, sequence: KVSequence) -> None:
        """Give back everything."""
        self.truncate(sequence, 0)

    def match_prefix(
        self, sequence: KVSequence, token_ids: Sequence[int], salt: str, limit: int | None = None
    ) -> int:
        """Start an empty sequence on the cached pages of its longest known beginning; the number of tokens covered.

        At least one token is left to compute, since its logits are what the caller is after; all from `limit` on, where more are
        wanted. Raises ValueError when the sequence has pages already.
        """
        if sequence.pages:
            raise ValueError("only an empty sequence can start on a cached prefix")
        if not self._prefix_caching:
            return 0
        most = len(token_ids) - 1 if limit is None else min(len(token_ids) - 1, limit)
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

    def cache_pages(self, sequence: KVSequence, token_ids: Sequence[int], salt: str) -> None:
        """Make the full pages of committed tokens findable; pages published before cost nothing."""
        if not self._prefix_caching:
            return
        published = len(sequence.digests)
        if sequence.num_computed_tokens < (published + 1) * self.page_size:
            return
        full = min(sequence.num_computed_tokens, len(token_ids)) // self.page_size
        for i in range(published, full):
            digest = self._digest(sequence.digests, token_ids, i, salt)
            sequence.digests.append(digest)
            if digest not in self._by_digest:
                self._by_digest[digest] = sequence.pages[i]
                self._digest_of[sequence.pages[i]] = digest

    def check_integrity(self, sequences: Iterable[KVSequence] = ()) -> None:
        """Raise RuntimeError unless every page is blank, idle, or held by exactly as many of `sequences` as counted."""
        held = [0] * self.page_count
        for sequence in sequences:
            for page in sequence.pages:
                held[page] += 1
        if held != self._holders:
            raise RuntimeError("pages are held by others than counted")
        blank, idle = set(self._blank), set(self._idle)
        unheld = {page for page, count in enumerate(held) if count == 0}
        if blank & idle or blank | idle != unheld or len(blank) != len(self._blank):
            raise RuntimeError("a page is lost, or free twice")
        if {
            page: digest for digest, page in self._by_digest.items()
        } != self._digest_of or not idle <= self._digest_of.keys():
            raise RuntimeError("the index of published pages is inconsistent")

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
        parent = before[-1] if before else hashlib.sha256(salt.encode()).digest()
        block = array("I", token_ids[index * self.page_size : (index + 1) * self.page_size])
        return hashlib.sha256(parent + block.tobytes()).digest()
