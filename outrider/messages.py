"""The protos' messages as plain data, without protobuf, grpc or torch.

`outrider.wire` checks every object that it makes: ids, counts and numbers are in the ranges that
the protos state. Nothing changes a message after its creation, but classes that each step creates
for every sequence are not frozen, because that takes four times as long. Enums have the protos'
values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from outrider.grammar.kinds import Grammar
from outrider.limits import MAX_DRAFT_TOKENS, MAX_RELAXED_TOPK, MIN_TEMPERATURE, Range
from outrider.model_info import Placement


class DraftDistribution(IntEnum):
    """The distributions that a drafter sends with its proposals; they decide the rule."""

    ONE_HOT = 1
    SPARSE = 2
    COUPLED = 3


class TokenSource(IntEnum):
    """Who wrote a committed token."""

    PLAIN = 1
    ACCEPTED = 2
    RECOVERED = 3
    BONUS = 4


class FinishReason(IntEnum):
    """Why a sequence ended."""

    STOP = 1
    LENGTH = 2


class Acceptance(Enum):
    """How closely the output has to follow the target. All but EXACT are lossy."""

    EXACT = 1
    TYPICAL = 2
    RELAXED = 3


AcceptanceLabel = Literal["exact", "typical", "relaxed"]
"""Names of `Acceptance` in HTTP requests."""


class AcceptanceRule(IntEnum):
    """The rule that accepted or rejected a draft's tokens."""

    GREEDY = 1
    COUPLED = 2
    TOKEN_WISE = 3
    BLOCK = 4
    TYPICAL = 5
    RELAXED = 6
    SYNTHETIC = 7

    @property
    def lossy(self) -> bool:
        """Whether the output's distribution may differ from the target's."""
        return self in _LOSSY_RULES

    @property
    def label(self) -> str:
        """The name in settings and answers, such as "token-wise"."""
        return self.name.lower().replace("_", "-")


_LOSSY_RULES = (AcceptanceRule.TYPICAL, AcceptanceRule.RELAXED, AcceptanceRule.SYNTHETIC)
SampledRule = Literal["block", "token-wise"]
"""Labels of the rules for drafts that a trusted drafter sampled."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn; `outrider.sampling.sampler` documents the order of the steps.

    Temperature 0 is greedy, top_k 0 is off. `logit_bias` is (token id, value) pairs; ids differ.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    banned_token_ids: tuple[int, ...] = ()
    # Computed once, because each step reads them for every sequence.
    greedy: bool = field(init=False, repr=False, compare=False)
    adjusts: bool = field(init=False, repr=False, compare=False)
    """Whether bias, penalties, bans or min_tokens change the logits before the temperature."""

    def __post_init__(self) -> None:
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        object.__setattr__(self, "greedy", self.temperature == 0.0)
        adjusts = self.logit_bias or self.penalised or self.banned_token_ids or self.min_tokens
        object.__setattr__(self, "adjusts", bool(adjusts))

    @property
    def penalised(self) -> bool:
        """Whether the tokens so far change a token's probability."""
        added = self.presence_penalty or self.frequency_penalty
        return self.repetition_penalty != 1.0 or bool(added)


SAMPLING_RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, low_is_open=True),
    "min_p": Range(
        0, 1, about="vLLM's extension. Drop tokens less likely than this fraction of the likeliest."
    ),
    "typical_p": Range(0, 1, low_is_open=True, about="Locally typical sampling, up to this mass."),
    "repetition_penalty": Range(0.01, 10, about="vLLM's extension. Applies to prompt and output."),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}
"""Numbers of SamplingParams whose range no model changes. gRPC and HTTP take and check them."""


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Whether to speculate and how.

    `drafter` is an id or a family; empty takes any. `draft_tokens` None takes the verifier's
    setting.
    """

    enabled: bool = True
    drafter: str = ""
    draft_tokens: int | None = None
    acceptance: Acceptance = Acceptance.EXACT
    typical_epsilon: float = 0.09
    relaxed_topk: int = 10
    relaxed_delta: float = 0.6


SPECULATION_RANGES = {
    "draft_tokens": Range(0, MAX_DRAFT_TOKENS),
    "typical_epsilon": Range(0, 1, low_is_open=True),
    "relaxed_topk": Range(1, MAX_RELAXED_TOPK),
    "relaxed_delta": Range(0, 1),
}
"""Fields of SpeculationOptions with a range. gRPC and HTTP enforce it."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One sequence to generate.

    `top_logprobs` is the number of likeliest tokens to report with each generated token,
    `prompt_logprobs` with each of the prompt; None asks for none. The output goes on behind
    `committed`. `noise_seed` seeds the random numbers if `sampling` has no seed.
    """

    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    tenant: str = ""
    request_id: str = ""
    traceparent: str = ""
    min_chunk_tokens: int = 1
    top_logprobs: int | None = None
    grammar: Grammar | None = None
    prediction: list[int] = field(default_factory=list)
    prompt_logprobs: int | None = None
    committed: list[int] = field(default_factory=list)
    noise_seed: int | None = None


@dataclass(slots=True)
class SpeculationStats:
    """Counts of speculation for one sequence, in vLLM's definitions.

    `histogram[i]` counts the verifying steps that accepted i tokens. `rules` lists the acceptance
    rules that were used, without repetition.
    """

    forward_count: int = 0
    draft_count: int = 0
    draft_token_count: int = 0
    accepted_token_count: int = 0
    histogram: list[int] = field(default_factory=list)
    max_draft_tokens: int = 0
    rules: list[AcceptanceRule] = field(default_factory=list)

    def record(self, drafted: int, accepted: int, rule: AcceptanceRule | None = None) -> None:
        """Count a forward that verified `drafted` tokens by `rule` and accepted `accepted`."""
        self.forward_count += 1
        if drafted == 0:
            return
        if rule is not None and rule not in self.rules:
            self.rules.append(rule)
        self.draft_count += 1
        self.draft_token_count += drafted
        self.accepted_token_count += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of the target's unprocessed softmax for a token and the likeliest ones.

    The likeliest come first. `rank` counts the tokens at least as likely as this one, with it.
    """

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0


@dataclass(slots=True)
class TokenChunk:
    """The tokens that one engine step committed for one sequence.

    `draft_token_count` is the number of draft tokens verified. The last chunk has a finish reason
    and statistics. `prompt_logprobs` begin with the prompt's second token, and each chunk
    continues those of the chunk before.
    """

    token_ids: list[int]
    sources: list[TokenSource]
    drafter_id: str = ""
    finish_reason: FinishReason | None = None
    stats: SpeculationStats | None = None
    cached_token_count: int = 0
    draft_token_count: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def joined(self, after: TokenChunk) -> TokenChunk:
        """Merge this chunk with the next one."""
        return replace(
            after,
            token_ids=[*self.token_ids, *after.token_ids],
            sources=[*self.sources, *after.sources],
            draft_token_count=self.draft_token_count + after.draft_token_count,
            logprobs=[*self.logprobs, *after.logprobs],
            prompt_logprobs=[*self.prompt_logprobs, *after.prompt_logprobs],
        )


@dataclass(frozen=True, slots=True)
class Hello:
    """A drafter's introduction."""

    drafter_id: str
    family: str
    tokenizer_fingerprint: str
    max_draft_tokens: int
    """Longest chain of draft tokens that it proposes for a step."""
    distributions: frozenset[DraftDistribution] = frozenset({DraftDistribution.ONE_HOT})
    placement: Placement = field(default_factory=Placement)
    max_sequence_count: int = 0
    """Most sequences at a time; 0 for no limit."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The verifier's answer to a Hello."""

    model_id: str
    vocab_size: int
    context_length: int


@dataclass(frozen=True, slots=True)
class Window:
    """How far a drafter may run ahead: `token_count` draft tokens in all, `depth` in a row."""

    token_count: int
    depth: int


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """Probability `probabilities[i]` for `token_ids[i]`, 0 for every other token.

    `token_ids` is int64 [S], `probabilities` float64 [S], already renormalised.
    """

    token_ids: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Opened:
    """The verifier hands a sequence to a drafter.

    `token_ids` are the committed tokens; the first `prompt_length` of them are the prompt. The next
    step can use `draft_tokens` in a row; for a tree, `tree_tokens` in all are worth sending.
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
    """Guesses behind the first `base_length` committed tokens.

    `parents` is empty for a chain. For a tree it holds each token's parent: 0 for the base, j for
    `token_ids[j - 1]`. `distributions` is empty or holds, for each token, the distribution it was
    sampled from; None for a one-hot token and where an earlier proposal had the distribution.
    `confidences` is empty or holds the drafter's estimates, in (0, 1], of the probability that each
    token is committed if its parent is.
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
    """The drafter proposes nothing more behind `base_length` tokens until the next verdict."""

    sequence_id: int
    base_length: int


@dataclass(slots=True)
class Verdict:
    """The verifier committed `new_token_ids`, the last of now `committed_length` tokens.

    `accepted_count` is the number of this drafter's tokens that the last commit matched. A `window`
    of None leaves the window as it is. `draft_tokens` and `tree_tokens` are as in Opened.
    """

    sequence_id: int
    committed_length: int
    new_token_ids: list[int]
    accepted_count: int
    draft_tokens: int
    window: Window | None = None
    traceparent: str = ""
    tree_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """The sequence has ended for this drafter."""

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
    verdicts: list[Verdict] = field(default_factory=list)
    closed: list[Closed] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.opened or self.verdicts or self.closed)
