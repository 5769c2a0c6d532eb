"""The library for drafters of your own: you write a strategy, and the library does the rest.

    from outrider.drafter import serve

    serve(guess, name="mine", verifier="127.0.0.1:50051")

`guess(text, count)` returns up to `count` tokens that may follow the text. A `Strategy` can do
more: keep state for each sequence, offer branches, sample, draw with the verifier's own noise.
docs/drafters.md explains functions and strategies; docs/protocol.md explains the messages.
"""

from outrider.drafter.draft_sequence import DraftSequence
from outrider.drafter.grpc_transport import Dialled
from outrider.drafter.serve import serve
from outrider.drafter.strategy import Guess, GuessStrategy, Strategy
from outrider.drafter.stream import DraftStream, Observer
from outrider.protocol.draft_messages import (
    FeatureDtype,
    FeatureRequest,
    Opened,
    SparseDistribution,
    Welcome,
)
from outrider.protocol.messages import DraftDistribution
from outrider.sampling.noise import coupled_draw

__all__ = [
    "Dialled",
    "DraftDistribution",
    "DraftSequence",
    "DraftStream",
    "FeatureDtype",
    "FeatureRequest",
    "Guess",
    "GuessStrategy",
    "Observer",
    "Opened",
    "SparseDistribution",
    "Strategy",
    "Welcome",
    "coupled_draw",
    "serve",
]
