"""The draft stream's messages as plain data, without protobuf, grpc or torch.

`outrider.protocol.wire.drafts` checks every message that comes in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from outrider.grammar.kinds import Grammar
from outrider.protocol.messages import DraftDistribution, SamplingParams
from outrider.protocol.model_info import Placement

if TYPE_CHECKING:
    from outrider.lm.streams import SharedRows

FeatureRows: TypeAlias = "bytes | SharedRows"
"""Features of consecutive tokens, see `Features`."""
FINAL_STATE = -1
"""In a list of layers: the state after the final norm, from which the logits are computed."""


class FeatureDtype(IntEnum):
    """The type of a feature's numbers."""

    BFLOAT16 = 1
    FLOAT16 = 2
    FLOAT32 = 3

    @property
    def size(self) -> int:
        """The number of bytes of one feature number."""
        return 4 if self is FeatureDtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """The target's hidden states that make up a token's feature, one after the other.

    First come the residual streams that enter the layers `aux_layers`, then, with `final_state`,
    the state after the final norm. Only the last `last_prompt_token_count` tokens of a prompt need
    features; None stands for all. `projection` names the projection that the verifier may apply to
    the states.
    """

    aux_layers: tuple[int, ...] = ()
    final_state: bool = False
    dtype: FeatureDtype = FeatureDtype.BFLOAT16
    last_prompt_token_count: int | None = None
    projection: str = ""

    @property
    def states(self) -> list[int]:
        """The states in a feature's order: the auxiliary layers, then FINAL_STATE if wanted."""
        return [*self.aux_layers, *([FINAL_STATE] if self.final_state else [])]


@dataclass(frozen=True, slots=True)
class Hello:
    """A drafter's introduction."""

    drafter_id: str
    family: str
    tokenizer_fingerprint: str
    max_draft_tokens: int
    """Longest chain of draft tokens that the drafter proposes for a step."""
    distributions: frozenset[DraftDistribution] = frozenset({DraftDistribution.ONE_HOT})
    placement: Placement = field(default_factory=Placement)
    max_sequence_count: int | None = None
    """The maximum number of sequences that the drafter takes at a time; None for no limit."""
    feature_request: FeatureRequest | None = None
    """The features that the drafter can use; None if it uses no features."""
    requires_grammar: bool = False
    """True if the drafter drafts only for sequences with a grammar."""
    weights_version: str = ""
    """The version of the drafter's weights, for metrics; empty if it has no weights."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The verifier's answer to a Hello.

    `feature_width` is the count of numbers in a feature; 0 if the verifier sends no features. With
    `projects_features`, features are the result of the projection that the drafter asked for.
    """

    model_id: str
    vocab_size: int
    context_length: int
    feature_width: int = 0
    projects_features: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """The limit for running ahead: `token_count` draft tokens in all, `depth` in a row."""

    token_count: int
    depth: int


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A distribution: `probabilities[i]` for `token_ids[i]`, 0 for every other token.

    `token_ids` is int64 [S], `probabilities` float64 [S], already renormalised.
    """

    token_ids: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Opened:
    """A message with which the verifier opens a sequence at a drafter.

    `token_ids` are the committed tokens; the first `prompt_length` of them are the prompt. The next
    step can use `draft_tokens` guesses in a row. If it verifies a tree, `tree_tokens` guesses in
    all are worth sending.
    """

    sequence_id: int
    token_ids: list[int]
    sampling: SamplingParams
    distribution: DraftDistribution
    window: Window
    draft_tokens: int
    tenant: str = ""
    traceparent: str = ""
    grammar: Grammar | None = None
    prediction: list[int] = field(default_factory=list)
    prompt_length: int = 0
    tree_tokens: int = 0


@dataclass(slots=True)
class Proposal:
    """Guesses after the first `base_length` committed tokens.

    `parents` is empty for a chain. For a tree it holds each token's parent: 0 for the base, j for
    `token_ids[j - 1]`. `distributions` is empty or holds, for each token, the distribution from
    which it was sampled; None for a one-hot token and where an earlier proposal had the
    distribution. `confidences` is empty or holds the drafter's estimates, in (0, 1], of the
    probability that each token is committed if its parent is.
    """

    sequence_id: int
    base_length: int
    token_ids: list[int]
    parents: list[int] = field(default_factory=list)
    distributions: list[SparseDistribution | None] = field(default_factory=list)
    draft_seconds: float = 0.0
    confidences: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Skip:
    """Says that no more drafts after `base_length` tokens come before the next verdict."""

    sequence_id: int
    base_length: int


@dataclass(slots=True)
class Verdict:
    """Says that `new_token_ids` were committed, which makes `committed_length` tokens in all.

    `matched_token_count` is the number of this drafter's guesses that the last commit confirmed. A
    `window` of None leaves the window as it is. `draft_tokens` and `tree_tokens` are as in Opened.
    """

    sequence_id: int
    committed_length: int
    new_token_ids: list[int]
    matched_token_count: int
    draft_tokens: int
    window: Window | None = None
    traceparent: str = ""
    tree_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Features:
    """The features of consecutive tokens, from the token at `first_position` on.

    `rows` has the numbers of each token's feature in turn: little endian, of the requested type; or
    in the verifier's own process a tensor [T, F] of that type, on the target's device.
    """

    sequence_id: int
    first_position: int
    rows: FeatureRows


@dataclass(frozen=True, slots=True)
class Closed:
    """Says that the sequence has ended for this drafter."""

    sequence_id: int


@dataclass(slots=True)
class DraftBatch:
    """A drafter's messages of one round; skips apply after proposals."""

    proposals: list[Proposal] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)


@dataclass(slots=True)
class StepBatch:
    """An engine step's messages to one drafter; they apply in the order of the fields."""

    opened: list[Opened] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    closed: list[Closed] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.opened or self.features or self.verdicts or self.closed)

    @property
    def feature_bytes(self) -> int:
        """The size of all features in bytes."""
        rows = [features.rows for features in self.features]
        return sum([len(each) if isinstance(each, bytes) else each.nbytes for each in rows])
