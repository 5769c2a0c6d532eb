"""Write your own drafter: a strategy is a function of a text, and the rest is here.

    from outrider.drafter import serve

    serve(guess, name="mine", verifier="127.0.0.1:50051")

`guess(text, count)` returns up to `count` tokens that may follow the text. A `Strategy` can do
more: keep state for each sequence, offer branches, sample, draw with the verifier's own noise.
docs/drafters.md has both; docs/protocol.md has what goes over the wire.
"""

from outrider.drafter.draft_sequence import DraftSequence
from outrider.drafter.serve import serve
from outrider.drafter.strategy import Guess, GuessStrategy, Strategy
from outrider.drafter.stream import DraftStream, Observer
from outrider.messages import DraftDistribution, Opened, SparseDistribution
from outrider.sampling.noise import coupled_draw

__all__ = [
    "DraftSequence",
    "DraftStream",
    "Guess",
    "GuessStrategy",
    "Observer",
    "Opened",
    "DraftDistribution",
    "SparseDistribution",
    "Strategy",
    "coupled_draw",
    "serve",
]
