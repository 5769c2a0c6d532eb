"""The sampling settings under which texts must follow the target, or equal plain texts."""

from __future__ import annotations

from outrider.protocol.messages import SamplingParams
from tests.losslessness.exact import END

SETTINGS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(0.6),
    "top-k": SamplingParams(top_k=5),
    "top-p": SamplingParams(1.3, top_p=0.8),
    "min-p": SamplingParams(min_p=0.02),
    "typical-p": SamplingParams(1.2, typical_p=0.7),
    "penalties": SamplingParams(
        repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.5
    ),
    "bias and bans": SamplingParams(logit_bias=((2, 4.0), (12, -3.0)), banned_token_ids=(8, 1)),
    "min-tokens": SamplingParams(1.5, logit_bias=((END, 6.0),), min_tokens=2),
    "everything": SamplingParams(
        1.4,
        12,
        0.95,
        min_p=0.01,
        typical_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        logit_bias=((4, 3.0), (END, 4.0)),
        min_tokens=1,
        banned_token_ids=(11,),
    ),
}
