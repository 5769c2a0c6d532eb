"""Our requests in vLLM's parameters.

vLLM gets a greedy request. `SamplingParams.extra_args` says how its tokens are drawn, as plain data
under the key "outrider", where `noise` finds it in vLLM's workers. vLLM itself applies only a
request's length, end tokens, grammar and log probabilities. Our code makes all other changes to the
logits, so the order of the changes is as in `outrider.sampling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from outrider.protocol.messages import SamplingParams, TokenRequest
from outrider.protocol.unsupported import Unsupported, check_supported
from verifier_svc.state.sequence import Sequence

if TYPE_CHECKING:
    import vllm

UNSUPPORTED = tuple(kind.value for kind in Unsupported)
"""What vLLM cannot do as our own engine does: each kind of `Unsupported`."""

_KEY = "outrider"
_PLAIN = SamplingParams()
# The seed stands beside the sampling, since every sequence has one.
_FIELDS = tuple(each.name for each in fields(SamplingParams) if each.init and each.name != "seed")


@dataclass(frozen=True, slots=True)
class Drawing:
    """The settings, besides logits and tokens, that decide how a request's tokens are drawn."""

    sampling: SamplingParams
    seed: int
    prompt_length: int
    """The number of the prompt's tokens. vLLM's prompt also has what was committed before."""
    end_ids: frozenset[int] = frozenset()
    """The tokens that `min_tokens` keeps away; empty without it."""


def check(request: TokenRequest) -> None:
    """Raise OutriderError(UNSUPPORTED_PARAMETER) for what vLLM cannot do as our own engine does."""
    grammar = request.grammar
    check_supported(request, UNSUPPORTED, "" if grammar is None else grammar.field)


def vllm_parameters(sequence: Sequence, lark: str | None = None) -> vllm.SamplingParams:
    """Return the parameters of vLLM's request for a sequence.

    The prompt of vLLM's request is all of `sequence.tokens`. `lark` is the sequence's grammar, as
    our compiler has translated it for vLLM's backend "guidance". Each output of vLLM has only the
    tokens since the output before it. Log probabilities are vLLM's "raw_logprobs".
    """
    import vllm
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    request = sequence.request
    structured = None
    if lark is not None:
        structured = StructuredOutputsParams(grammar=lark)
    return vllm.SamplingParams(
        temperature=0.0,
        max_tokens=request.max_tokens - (len(sequence.tokens) - len(request.prompt)),
        # The end tokens are all here, so vLLM adds none of its own.
        stop_token_ids=sorted(sequence.end_ids),
        ignore_eos=True,
        logprobs=request.top_logprobs,
        # A sequence that had a forward before it was unread has already sent the log probabilities
        # of its prompt.
        prompt_logprobs=None if sequence.stats.forward_count else request.prompt_logprobs,
        structured_outputs=structured,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={_KEY: _plain(sequence)},
    )


def _plain(sequence: Sequence) -> dict[str, Any]:
    """Return what a worker needs of a sequence: only its id if vLLM itself may draw the tokens."""
    request = sequence.request
    sampling = request.sampling
    plain: dict[str, Any] = {"sequence_id": sequence.id}
    if sampling.greedy and not sampling.adjusts:
        return plain
    plain |= {"seed": sequence.seed, "prompt_length": len(request.prompt)}
    if sampling.min_tokens:
        plain["end_ids"] = sorted(sequence.end_ids)
    for name in _FIELDS:
        value = getattr(sampling, name)
        if value != getattr(_PLAIN, name):
            plain[name] = value
    return plain


def strip(parameters: vllm.SamplingParams) -> None:
    """Remove our part from a request that is not ours: its sender may not know what it means."""
    if parameters.extra_args:
        parameters.extra_args.pop(_KEY, None)


def sequence_id_of(parameters: vllm.SamplingParams) -> int | None:
    """Return the sequence id of a request of vLLM; None for a request that is not ours."""
    number = _ours(parameters).get("sequence_id")
    return number if isinstance(number, int) else None


def drawing_of(parameters: vllm.SamplingParams) -> Drawing | None:
    """Return how to draw a request's tokens; None if vLLM draws them.

    vLLM draws for requests that are not ours, and for greedy requests that adjust no logits.
    """
    plain = _ours(parameters)
    if "seed" not in plain:
        return None
    sampling = SamplingParams(**{name: _frozen(plain[name]) for name in _FIELDS if name in plain})
    end_ids = frozenset(plain.get("end_ids", ()))
    return Drawing(sampling, plain["seed"], plain["prompt_length"], end_ids)


def _ours(parameters: vllm.SamplingParams) -> Mapping[str, Any]:
    """Return our part of the extra arguments. The scheduler removes it from others' requests."""
    plain = (parameters.extra_args or {}).get(_KEY)
    return plain if isinstance(plain, dict) else {}


def _frozen(value: Any) -> Any:
    """Return the value with its lists turned into tuples.

    Sending between processes turns tuples into lists.
    """
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value
