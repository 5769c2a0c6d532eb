"""The limits that the protos and the OpenAI API state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`; without `low` itself if `low_is_open`; never NaN."""

    low: float
    high: float
    low_is_open: bool = False
    about: str | None = None
    """What the number does, for /openapi.json; None for OpenAI's own parameters."""

    def __contains__(self, value: float) -> bool:
        above = self.low < value if self.low_is_open else self.low <= value
        return above and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.low_is_open else '['}{self.low}, {self.high}]"

    @property
    def json_schema(self) -> dict[str, float]:
        """The keywords of JSON schema that state the range."""
        lower = "exclusiveMinimum" if self.low_is_open else "minimum"
        return {lower: self.low, "maximum": self.high}


# Requests.
MAX_NAME_LENGTH = 128
MAX_MESSAGES = 2048
"""The maximum number of messages of a chat."""
MAX_STOP_TOKENS = 64
MAX_LISTED_TOKENS = 1024
"""The maximum number of entries of logit_bias and of banned_token_ids."""
MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_CHARACTERS = 65536
MAX_CHOICES = 1024
MAX_MARK_CHARACTERS = 256
"""The maximum number of characters of each mark of a thought that a grammar leaves free."""
MAX_RELAXED_TOP_K = 64
MAX_GATHERED_TOKENS = 4096
"""The maximum number of tokens that the verifier gathers for one chunk."""
# Below this temperature sampling is greedy, as in vLLM: logits divided by a smaller temperature
# overflow float32, and the argmax has all the probability.
MIN_TEMPERATURE = 1e-5

# Drafts.
MAX_DRAFT_TOKENS = 64
"""The maximum number of draft tokens of a sequence that one step verifies."""
MAX_FAMILY_LENGTH = 64
MAX_DISTRIBUTION_ENTRIES = 256
MAX_BATCH_ENTRIES = 4096
MAX_BATCH_TOKENS = 16384
"""The maximum number of tokens of a drafter's message: MAX_DRAFT_TOKENS for 256 sequences."""
MAX_PROPOSAL_TOKENS = 1024
MAX_WINDOW_DEPTH = 128
MAX_WINDOW_TOKENS = 4096
MAX_AUX_LAYERS = 16
# The verifier caps the drafting time that a drafter reports.
MAX_DRAFT_SECONDS = 60.0
# The float32 probabilities of a distribution may sum to 1 ± this tolerance.
SUM_TOLERANCE = 1e-3

# Placements. Linux numbers at most 8192 logical processors and 1024 NUMA nodes.
MAX_CORES = 1024
MAX_CORE_ID = 65_535
MAX_NODE_ID = 65_535
