"""A whole drafter. It finds the text's last tokens earlier in the text, and guesses what followed.

python examples/ngram_drafter.py 127.0.0.1:50051
"""

import sys
from collections.abc import Sequence

from outrider.drafter import serve

LONGEST_MATCH = 3


def guess(text: Sequence[int], count: int) -> Sequence[int]:
    """Up to `count` tokens that may follow the text; none if its last token never came before."""
    for size in range(min(LONGEST_MATCH, len(text) - 1), 0, -1):
        found = followers(text, size, count)
        if found:
            return found
    return []


def followers(text: Sequence[int], size: int, count: int) -> Sequence[int]:
    """The tokens that followed an earlier occurrence of the last `size` tokens.

    Take the newest occurrence with `count` tokens after it, or else the one with most after it.
    """
    best: Sequence[int] = []
    for start in range(len(text) - size - 1, -1, -1):
        if text[start : start + size] == text[-size:]:
            found = text[start + size : start + size + count]
            if len(found) > len(best):
                best = found
            if len(best) == count:
                break
    return best


if __name__ == "__main__":
    serve(guess, name="example-ngram", verifier=sys.argv[1])
