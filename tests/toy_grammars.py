"""Grammars over a few tokens, each with a function that says which tokens may follow a text."""

from __future__ import annotations

from outrider.grammar.backends import Mask


class ToyGrammar:
    """A matcher of the texts whose every token passes `allows`."""

    vocab_size = 8
    """The number of tokens in a mask; at most the size of the model's vocabulary."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def allows(self, token: int) -> bool:
        """Return whether the token may follow the text."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """True if nothing may follow the text."""
        return False

    def accept(self, token: int) -> bool:
        allowed = not self.ended and self.allows(token)
        if allowed:
            self.text.append(token)
        return allowed

    def rollback(self, count: int) -> None:
        assert count <= len(self.text)
        del self.text[len(self.text) - count :]

    def fill(self, mask: Mask, row: int) -> None:
        tokens = () if self.ended else range(self.vocab_size)
        mask[row] = sum(1 << token for token in tokens if self.allows(token))


class Heads(ToyGrammar):
    """A grammar of any number of the tokens 0 and 1."""

    def allows(self, token: int) -> bool:
        return token < 2


class Alternating(ToyGrammar):
    """A grammar in which even and odd tokens take turns. The first token is even."""

    def allows(self, token: int) -> bool:
        return (token + len(self.text)) % 2 == 0


class NoRepeats(ToyGrammar):
    """A grammar without two equal tokens in a row, and with token 7 at the end."""

    @property
    def ended(self) -> bool:
        return self.text[-1:] == [7]

    def allows(self, token: int) -> bool:
        return self.text[-1:] != [token]


class Twice(ToyGrammar):
    """A grammar with the token 0 twice, and the token 1 at the end."""

    @property
    def ended(self) -> bool:
        return len(self.text) == 3

    def allows(self, token: int) -> bool:
        return token == [0, 0, 1][len(self.text)]


class Ladder(ToyGrammar):
    """A grammar in which each token is the token before plus 1 or 2; the first is 1 or 2."""

    vocab_size = 31

    def allows(self, token: int) -> bool:
        return token - (self.text or [0])[-1] in (1, 2)
