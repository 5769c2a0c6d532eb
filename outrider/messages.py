"""The domain's messages as plain data: what the protos carry, without protobuf, grpc or torch.

Objects that come out of `outrider.wire` have been checked: ids, counts and numbers are in the ranges the protos state. Those that
each step makes for every sequence are not frozen, here and in the verifier, since that takes four times as long; none is changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum

import numpy as np
import numpy.typing as npt

MAX_DEPTH = 64
MAX_NAME_LENGTH = 128
MAX_FAMILY_LENGTH = 64
MAX_STOP_TOKENS = 64
MAX_LISTED_TOKENS = 1024
MAX_TOP_LOGPROBS = 20
# Below it sampling is greedy, as in vLLM: logits over so little are beyond float32, and the argmax has all the probability.
MIN_TEMPERATURE = 1e-5
MAX_GRAMMAR_CHARACTERS = 65536
MAX_CHOICES = 1024
MAX_RELAXED_TOPK = 64
MAX_GATHERED_TOKENS = 4096


class DraftDistribution(IntEnum):
    """What a drafter sends with a sequence's proposals, which decides how they are judged: the proto's `DraftDistribution`."""

    ONE_HOT = 1
    SPARSE = 2
    COUPLED = 3


class TokenSource(IntEnum):
    """Who wrote a committed token; the values are those of the proto."""

    PLAIN = 1
    ACCEPTED = 2
    RECOVERED = 3
    BONUS = 4


class FinishReason(IntEnum):
    """Why a sequence ended; the values are those of the proto."""

    STOP = 1
    LENGTH = 2


class CloseReason(IntEnum):
    """Why a sequence was closed to a drafter; the values are those of the proto."""

    ENDED = 1


class Stage(Enum):
    """How far a verifier has loaded."""

    LOADING = 1
    WARMING_UP = 2
    READY = 3
    DRAINING = 4
    FAILED = 5


class Acceptance(Enum):
    """How closely the output has to follow the target; the values are those of the proto. All but EXACT are lossy."""

    EXACT = 1
    TYPICAL = 2
    RELAXED = 3


class AcceptanceRule(IntEnum):
    """The rule that judged a draft; the values are those of the proto."""

    GREEDY = 1
    COUPLED = 2
    TOKEN_WISE = 3
    BLOCK = 4
    TYPICAL = 5
    RELAXED = 6
    SYNTHETIC = 7

    @property
    def lossy(self) -> bool:
        """Whether output judged by it may differ in law from the target's own."""
        return self >= AcceptanceRule.TYPICAL


class GrammarKind(Enum):
    """What a grammar's text is; the values are the names of the proto's fields."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the output must be. `text` is empty for JSON_OBJECT and CHOICE, `choices` for all but CHOICE."""

    kind: GrammarKind
    text: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn; see `outrider.sampling.sampler` for the order. Temperature 0 is greedy, and top_k 0 is off.

    `logit_bias` is (token id, value) pairs, no id twice.
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
    # Found once, since each step asks it of every sequence.
    greedy: bool = field(init=False, repr=False, compare=False)
    adjusts: bool = field(init=False, repr=False, compare=False)
    """Whether it changes logits before the temperature does."""

    def __post_init__(self) -> None:
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        object.__setattr__(self, "greedy", self.temperature == 0.0)
        adjusts = self.logit_bias or self.penalised or self.banned_token_ids or self.min_tokens
        object.__setattr__(self, "adjusts", bool(adjusts))

    @property
    def penalised(self) -> bool:
        """Whether a token's chance depends on the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Whether to speculate, with which drafter (id or family; empty: any) and how deep (None: the verifier's setting)."""

    enabled: bool = True
    drafter: str = ""
    draft_tokens: int | None = None
    acceptance: Acceptance = Acceptance.EXACT
    typical_epsilon: float = 0.09
    relaxed_topk: int = 10
    relaxed_delta: float = 0.6


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One sequence to generate.

    `top_logprobs` and `prompt_logprobs` say how many of the likeliest tokens are wanted with each generated token and with each
    token of the prompt; None for no log probabilities.
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


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one sequence, in vLLM's definitions; `histogram[i]` counts steps that accepted i tokens.

    `rules` are those that judged its drafts.
    """

    forward_count: int = 0
    draft_count: int = 0
    draft_token_count: int = 0
    accepted_token_count: int = 0
    histogram: list[int] = field(default_factory=list)
    max_draft_tokens: int = 0
    rules: list[AcceptanceRule] = field(default_factory=list)

    def record(self, drafted: int, accepted: int, rule: AcceptanceRule | None = None) -> None:
        """Count one forward that verified `drafted` tokens by a rule and accepted `accepted` of them."""
        self.forward_count += 1
        if drafted == 0:
            return
        if rule is not None and rule not in self.rules:
            self.rules.append(rule)
        self.draft_count += 1
        self.draft_token_count += drafted
        self.accepted_token_count += accepted
        if accepted >= len(self.histogram):
            self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of the target's unprocessed softmax: of the token, and of the likeliest ones, best first.

    `rank` is how many tokens are at least as likely as this one, itself included.
    """

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0


@dataclass(slots=True)
class TokenChunk:
    """What one engine step committed for one sequence, and how many draft tokens it verified.

    The last chunk has a finish reason and statistics. `prompt_logprobs` go on where the chunk before left off, beginning with the
    prompt's second token.
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
        """This chunk and the one after it as one."""
        return replace(
            after,
            token_ids=[*self.token_ids, *after.token_ids],
            sources=[*self.sources, *after.sources],
            draft_token_count=self.draft_token_count + after.draft_token_count,
            logprobs=[*self.logprobs, *after.logprobs],
            prompt_logprobs=[*self.prompt_logprobs, *after.prompt_logprobs],
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a drafter runs; `cores` is empty when the process is not pinned, `numa_node` None when not bound."""

    kind: str = "local"
    host: str = ""
    device: str = "cpu"
    cores: tuple[int, ...] = ()
    numa_node: int | None = None
    architecture: str = ""


@dataclass(frozen=True, slots=True)
class Hello:
    """A drafter's introduction."""

    drafter_id: str
    family: str
    tokenizer_fingerprint: str
    max_draft_tokens: int
    """Most draft tokens, one behind the other, that it will ever propose for a step."""
    distributions: frozenset[DraftDistribution] = frozenset({DraftDistribution.ONE_HOT})
    placement: Placement = field(default_factory=Placement)
    max_sequence_count: int = 0
    wants_features: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """The verifier's answer to a Hello."""

    model_id: str
    vocab_size: int
    context_length: int


@dataclass(frozen=True, slots=True)
class Window:
    """How far a drafter may run ahead of the last committed token: in all, and one token behind the other."""

    token_count: int
    depth: int


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """Probability `probabilities[i] / sum(probabilities)` for `token_ids[i]`, 0 for every other token.

    `token_ids` is int64 [S], `probabilities` float64 [S], already renormalised.
    """

    token_ids: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence is handed to a drafter; `token_ids` are committed, the first `prompt_length` of them the prompt."""

    sequence_id: int
    token_ids: list[int]
    sampling: SamplingParams
    distribution: DraftDistribution
    window: Window
    draft_tokens: int
    """Draft tokens that the verifier has a use for in its next step."""
    tenant: str = ""
    traceparent: str = ""
    grammar: Grammar | None = None
    prediction: list[int] = field(default_factory=list)
    prompt_length: int = 0


@dataclass(slots=True)
class Proposal:
    """Guesses behind the first `base_length` committed tokens.

    `parents` is empty for a chain; otherwise it has the place of each token's parent, 0 for the base and j for `token_ids[j - 1]`.
    `distributions` is empty, or has for each token what it was sampled from; None if that was said before or the token is one-hot.
    """

    sequence_id: int
    base_length: int
    token_ids: list[int]
    parents: list[int] = field(default_factory=list)
    distributions: list[SparseDistribution | None] = field(default_factory=list)
    draft_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Skip:
    """Nothing more will come behind the first `base_length` committed tokens until the next verdict."""

    sequence_id: int
    base_length: int


@dataclass(slots=True)
class Verdict:
    """The last `new_token_ids` of `committed_length` tokens were committed; `accepted_count` is the drafter's share of a commit."""

    sequence_id: int
    committed_length: int
    new_token_ids: list[int]
    accepted_count: int
    draft_tokens: int
    """Draft tokens that the verifier has a use for in its next step."""
    window: Window | None = None
    """How far to run ahead from now on; None leaves it."""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    """The sequence is over for this drafter."""

    sequence_id: int
    reason: CloseReason = CloseReason.ENDED


@dataclass(slots=True)
class DraftBatch:
    """All a drafter has to say at once; skips apply after proposals."""

    proposals: list[Proposal] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)


@dataclass(slots=True)
class StepBatch:
    """All an engine step has to say to one drafter, in the order opened, verdicts, closed."""

    opened: list[Opened] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    closed: list[Closed] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.opened or self.verdicts or self.closed)


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A drafter as the verifier sees it."""

    drafter_id: str
    family: str
    placement: Placement
    connected: bool
    sequence_count: int
    acceptance_rate: float | None = None
    round_trip_s: float | None = None
    """From a verdict to what answers it, without the time spent drafting; None before the first."""
    token_s: float | None = None
    """Drafting one token; None before the first."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model a verifier serves and who drafts for it."""

    model_id: str
    stage: Stage
    stage_detail: str = ""
    tokenizer_fingerprint: str = ""
    vocab_size: int = 0
    context_length: int = 0
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    drafters: tuple[DrafterInfo, ...] = ()
    max_draft_tokens: int = 0
