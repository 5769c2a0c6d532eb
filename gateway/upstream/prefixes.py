"""Records to which replica each prefix of a prompt was last sent.

This replica probably has the prefix cached.

This module knows replicas only as addresses, and nothing of requests.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK_TOKENS = 64
# This number of prefixes stands for 8 million tokens, and takes some 30 MB.
_MOST_PREFIXES = 2**17


def prefixes(tenant: str, token_ids: Sequence[int]) -> list[bytes]:
    """Return a hash of each beginning of the prompt that is whole blocks long, the shortest first.

    Tenants share no hash, as they share no pages of a prefix cache. Prompts with ids that no model
    has get no prefixes; the request is refused later.
    """
    try:
        packed = array("I", token_ids).tobytes()
    except OverflowError:
        return []
    running = hashlib.sha256(repr(tenant).encode())
    size = 4 * BLOCK_TOKENS
    found = []
    for end in range(size, len(packed) + 1, size):
        running.update(packed[end - size : end])
        found.append(running.digest()[:16])
    return found


class PrefixRecord:
    """Maps each prefix to the address to which it was last sent.

    The least recently used prefix is dropped first.
    """

    def __init__(self, most: int = _MOST_PREFIXES) -> None:
        self._most = most
        self._address_of: OrderedDict[bytes, str] = OrderedDict()

    def note(self, prefixes: Sequence[bytes], address: str) -> None:
        """Note that a prompt with these prefixes goes to a replica."""
        # The longest prefix comes first, so that it is forgotten before the prefixes that it
        # contains.
        for prefix in reversed(prefixes):
            self._address_of[prefix] = address
            self._address_of.move_to_end(prefix)
        while len(self._address_of) > self._most:
            self._address_of.popitem(last=False)

    def holders(self, prefixes: Sequence[bytes]) -> Iterator[str]:
        """Yield the replicas that got prefixes of a prompt, the longest prefix's replica first."""
        seen = set()
        for prefix in reversed(prefixes):
            address = self._address_of.get(prefix)
            if address is not None and address not in seen:
                seen.add(address)
                yield address
