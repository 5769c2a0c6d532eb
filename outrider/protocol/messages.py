"""The protos' messages as plain data, without protobuf, grpc or torch.

`protocol.wire` checks the requests that it makes: ids, counts and numbers are in the ranges that
the protos state. It does not check chunks (`protocol.wire.requests`). Only `SpeculationStats`
changes after its creation, since it goes on counting. But classes that each step creates for every
sequence are not frozen, because creating a frozen object takes four times as long. Enums have the
protos' values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Literal

from outrider.grammar.kinds import Grammar
from outrider.protocol.limits import MAX_DRAFT_TOKENS, MAX_RELAXED_TOP_K, MIN_TEMPERATURE, Range


class DraftDistribution(IntEnum):
    """The kind of distribution that comes with proposals. The acceptance rule depends on it."""

    ONE_HOT = 1
    SPARSE = 2
    COUPLED = 3


class TokenSource(IntEnum):
    """How a step came to commit a token."""

    PLAIN = 1
    ACCEPTED = 2
    RECOVERED = 3
    BONUS = 4
    ACCEPTED_SIDE = 5
    """Accepted beside the main path of a draft with branches."""

    @property
    def is_accepted(self) -> bool:
        """True if the token is an accepted draft token."""
        return self in (TokenSource.ACCEPTED, TokenSource.ACCEPTED_SIDE)


class FinishReason(IntEnum):
    """The reason why a sequence ended."""

    STOP = 1
    LENGTH = 2


class Acceptance(Enum):
    """The rule for how closely the output follows the target. All but EXACT are lossy."""

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
        """True if the output's distribution may differ from the target's."""
        return self in _LOSSY_RULES

    @property
    def label(self) -> str:
        """The name in settings and answers, such as "token-wise"."""
        return self.name.lower().replace("_", "-")


class PauseReason(IntEnum):
    """The reason why steps verified no draft although the request may speculate."""

    UNKNOWN = 0
    NO_DRAFTER = 1
    TOO_SLOW = 2
    LOW_ACCEPTANCE = 3
    NO_GUESS = 4
    BUDGET = 5
    MEASURING = 6

    @property
    def label(self) -> str:
        """The name in answers and metrics, such as "too_slow"."""
        return self.name.lower()


_LOSSY_RULES = (AcceptanceRule.TYPICAL, AcceptanceRule.RELAXED, AcceptanceRule.SYNTHETIC)
SampledRule = Literal["block", "token-wise"]
"""Labels of the rules for drafts that a trusted drafter sampled."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The settings for drawing the next token; `outrider.sampling.sampler` has the order of steps.

    Temperature 0 is greedy, top_k 0 is off. `logit_bias` has pairs of token id and value, at most
    one for each id.
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
    # `greedy` and `adjusts` are computed once, because each step reads them for every sequence.
    greedy: bool = field(init=False, repr=False, compare=False)
    adjusts: bool = field(init=False, repr=False, compare=False)
    """True if bias, penalties, bans or min_tokens change the logits before the temperature."""

    def __post_init__(self) -> None:
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        object.__setattr__(self, "greedy", self.temperature == 0.0)
        adjusts = self.logit_bias or self.penalised or self.banned_token_ids or self.min_tokens
        object.__setattr__(self, "adjusts", bool(adjusts))

    @property
    def penalised(self) -> bool:
        """True if the tokens so far change a token's probability."""
        added = self.presence_penalty or self.frequency_penalty
        return self.repetition_penalty != 1.0 or bool(added)


SAMPLING_RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, low_is_open=True),
    "min_p": Range(
        0, 1, about="vLLM's extension. Drop tokens below this share of the highest probability."
    ),
    "typical_p": Range(
        0, 1, low_is_open=True, about="Locally typical sampling, up to this probability mass."
    ),
    "repetition_penalty": Range(0.01, 10, about="vLLM's extension. Applies to prompt and output."),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}
"""The ranges of numbers of SamplingParams, where all models have the same range. gRPC and HTTP
check them."""


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """The settings that say whether and how to speculate.

    At most one of `drafter_id` and `drafter_family` restricts drafting. If `draft_tokens` is None,
    the verifier's setting applies.
    """

    enabled: bool = True
    drafter_id: str = ""
    drafter_family: str = ""
    draft_tokens: int | None = None
    acceptance: Acceptance = Acceptance.EXACT
    typical_epsilon: float = 0.09
    relaxed_top_k: int = 10
    relaxed_delta: float = 0.6
    always_draft: bool = False


SPECULATION_RANGES = {
    "draft_tokens": Range(0, MAX_DRAFT_TOKENS),
    "typical_epsilon": Range(0, 1, low_is_open=True),
    "relaxed_top_k": Range(1, MAX_RELAXED_TOP_K),
    "relaxed_delta": Range(0, 1),
}
"""The ranges of fields of SpeculationOptions. gRPC and HTTP check them."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One sequence to generate.

    `top_logprobs` is the number of likeliest tokens to report with each generated token, and
    `prompt_logprobs` the number to report with each prompt token; None asks for no report. The
    output continues after `committed`. `noise_seed` seeds the random numbers if `sampling` has no
    seed. A verifier of another `model_fingerprint` refuses the request; an empty fingerprint suits
    any verifier.
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
    model_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class SpeculationPause:
    """The reason why at least half of a sequence's steps verified no draft, with measured times.

    `step_count` counts those steps, and `reason` is their most frequent reason. `forward_s` are the
    seconds of a step without drafts, `draft_s` the seconds from a verdict to the quickest drafter's
    draft; None if they were not measured.
    """

    reason: PauseReason
    step_count: int
    forward_s: float | None = None
    draft_s: float | None = None


@dataclass(slots=True)
class SpeculationStats:
    """Counts of speculation for one sequence, in vLLM's definitions.

    `histogram[i]` counts the verifying steps that accepted i tokens. `rules` lists each acceptance
    rule that was used, once. `paused` is set if at least half of the steps that could have verified
    a draft had none, although the request may speculate.
    """

    forward_count: int = 0
    draft_count: int = 0
    draft_token_count: int = 0
    accepted_token_count: int = 0
    histogram: list[int] = field(default_factory=list)
    max_draft_tokens: int = 0
    rules: list[AcceptanceRule] = field(default_factory=list)
    paused: SpeculationPause | None = None

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
    """Log probabilities of a token and the likeliest tokens, from the target's unprocessed softmax.

    All log probabilities are natural logarithms, and the likeliest tokens come first. `rank` counts
    the tokens at least as likely as this token, itself included.
    """

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0


@dataclass(slots=True)
class TokenChunk:
    """Tokens that one or several engine steps committed for one sequence.

    `draft_token_count` is the number of draft tokens that these steps verified, and
    `side_draft_token_count` the number of those draft tokens that lie beside the main path. The
    last chunk has a finish reason and statistics. `prompt_logprobs` of the first chunk begin with
    the prompt's second token, and each later chunk continues where the chunk before it ended.
    """

    token_ids: list[int]
    sources: list[TokenSource]
    drafter_id: str = ""
    finish_reason: FinishReason | None = None
    stats: SpeculationStats | None = None
    cached_token_count: int = 0
    draft_token_count: int = 0
    side_draft_token_count: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def accepted_count(self) -> int:
        """The number of accepted draft tokens."""
        return sum([source.is_accepted for source in self.sources])

    def joined(self, after: TokenChunk) -> TokenChunk:
        """Return one chunk with the tokens of this chunk and of the next chunk, `after`."""
        return replace(
            after,
            token_ids=[*self.token_ids, *after.token_ids],
            sources=[*self.sources, *after.sources],
            draft_token_count=self.draft_token_count + after.draft_token_count,
            side_draft_token_count=self.side_draft_token_count + after.side_draft_token_count,
            logprobs=[*self.logprobs, *after.logprobs],
            prompt_logprobs=[*self.prompt_logprobs, *after.prompt_logprobs],
        )
