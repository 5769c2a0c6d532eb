"""From an HTTP body to the request's sequences, each parameter checked under the caller's name. Knows no gRPC and no replica."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from gateway.request import AnswerLimit, Caller, Prompt, TextRequest, check_stop
from gateway.schema import (
    SEED_MAX,
    SEED_MIN,
    ChatBody,
    CompletionBody,
    GenerationBody,
    JsonValue,
    SpeculationBody,
    StructuredOutputs,
)
from outrider import wire, wire_settings
from outrider.errors import invalid
from outrider.messages import (
    MAX_STOP_TOKENS,
    Acceptance,
    Grammar,
    GrammarKind,
    ModelInfo,
    SamplingParams,
    SpeculationOptions,
    TokenRequest,
)

_COMPLETION_MAX_TOKENS = 16
# Sampling parameters that the body writes otherwise than `SamplingParams`; all have the same names in both.
_AS_SAMPLED: dict[str, Callable[[Any], Any]] = {
    "top_k": lambda top_k: 0 if top_k == -1 else top_k,
    "logit_bias": lambda given: _logit_bias(given),
    "banned_token_ids": tuple,
}


def text_requests(
    body: CompletionBody | ChatBody, prompts: Sequence[Prompt], n: int, caller: Caller, info: ModelInfo
) -> list[TextRequest]:
    """The request's sequences, n for each prompt, checked against a model.

    With a seed s, choice i is what a request for one choice with seed s + i would give.
    Raises OutriderError(INVALID_VALUE or CONTEXT_LENGTH_EXCEEDED) that names the field and the limit.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is only for stream: true")
    if body.speculation.tokens and body.stop:
        raise invalid("speculation.tokens", "does not go with stop, since tokens may hold a part of what is cut off")
    grammar, grammar_field = _grammar(body)
    sampling, stop, tokens = _sampling(body, info.vocab_size), check_stop(body.stop), _tokens(body, caller, info)
    wanted = _prompt_logprobs(body)
    limit = _answer_limit(body, scores_prompt=wanted is not None)
    text = partial(
        TextRequest,
        asked_tokens=limit.asked,
        stop=stop,
        shows_prompt=wanted is not None,
        attributed=body.speculation.tokens,
        grammar_field=grammar_field,
    )
    # Only a whole answer may come at once, and a stop string has to be looked for as the text grows.
    at_once = not body.stream and not stop and not body.speculation.tokens
    requests = []
    for prompt in prompts:
        max_tokens = limit.resolve(prompt, sampling.min_tokens, info)
        for choice in range(n):
            asked = tokens(
                prompt=prompt.token_ids,
                max_tokens=max_tokens,
                sampling=_of_choice(sampling, choice),
                min_chunk_tokens=max_tokens if at_once else 1,
                # A verifier generates nothing only for a prompt that it scores.
                prompt_logprobs=0 if max_tokens == 0 and wanted is None else wanted,
                grammar=grammar,
                prediction=prompt.prediction[: info.context_length],
            )
            requests.append(text(tokens=asked, echo=prompt.echo))
    return requests


def _tokens(body: CompletionBody | ChatBody, caller: Caller, info: ModelInfo) -> partial[TokenRequest]:
    """What the verifier is asked for every sequence of the request alike."""
    return partial(
        TokenRequest,
        stop_token_ids=_stop_token_ids(body.stop_token_ids or [], info.vocab_size),
        ignore_eos=bool(body.ignore_eos),
        speculation=_speculation(body.speculation),
        tenant=caller.tenant,
        request_id=caller.request_id,
        traceparent=caller.traceparent,
        top_logprobs=_top_logprobs(body),
    )


def _of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + choice) % 2**64)


def _answer_limit(body: CompletionBody | ChatBody, *, scores_prompt: bool) -> AnswerLimit:
    if isinstance(body, CompletionBody):
        return AnswerLimit(body.max_tokens, default=_COMPLETION_MAX_TOKENS, scores_prompt=scores_prompt)
    if body.max_completion_tokens is None:
        return AnswerLimit(body.max_tokens, scores_prompt=scores_prompt)
    if body.max_tokens is not None:
        raise invalid("max_tokens", "is the old name of max_completion_tokens; send one of them")
    return AnswerLimit(body.max_completion_tokens, "max_completion_tokens", scores_prompt=scores_prompt)


def _sampling(body: GenerationBody, vocab_size: int) -> SamplingParams:
    names = [field.name for field in fields(SamplingParams) if field.init]
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    sampling = SamplingParams(**{name: _AS_SAMPLED.get(name, _as_given)(value) for name, value in given.items()})
    wire_settings.check_sampling(sampling, vocab_size)
    if body.seed is not None and not SEED_MIN <= body.seed <= SEED_MAX:
        raise invalid("seed", f"must be in [{SEED_MIN}, {SEED_MAX}], not {body.seed}")
    return sampling


def _as_given(value: Any) -> Any:
    return value


def _logit_bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """OpenAI's object, whose keys are token ids written as strings."""
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid("logit_bias", f"must have token ids as keys, not {key[:40]!r}")
    pairs = {int(key): value for key, value in given.items()}
    if len(pairs) < len(given):
        raise invalid("logit_bias", "has a token id twice")
    return tuple(sorted(pairs.items()))


def _speculation(body: SpeculationBody) -> SpeculationOptions:
    options = SpeculationOptions(
        body.enabled,
        body.drafter,
        body.depth,
        Acceptance[body.acceptance.upper()],
        body.typical_epsilon,
        body.relaxed_topk,
        body.relaxed_delta,
    )
    wire_settings.check_speculation(options)
    return options


def _stop_token_ids(ids: list[int], vocab_size: int) -> frozenset[int]:
    if len(ids) > MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"must hold at most {MAX_STOP_TOKENS} ids, not {len(ids)}")
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise invalid(f"stop_token_ids[{index}]", f"must be in [0, {vocab_size}), not {token_id}")
    return frozenset(ids)


def _top_logprobs(body: CompletionBody | ChatBody) -> int | None:
    """How many of the likeliest tokens are wanted with each; None for no log probabilities at all."""
    if isinstance(body, CompletionBody):
        wire.check_logprobs("logprobs", body.logprobs)
        return body.logprobs
    wire.check_logprobs("top_logprobs", body.top_logprobs)
    if not body.logprobs:
        if body.top_logprobs:
            raise invalid("top_logprobs", "is only for logprobs: true")
        return None
    return body.top_logprobs or 0


def _prompt_logprobs(body: GenerationBody) -> int | None:
    """The same for the prompt's tokens, which an echo shows as it shows the others unless told otherwise."""
    wire.check_logprobs("prompt_logprobs", body.prompt_logprobs)
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "is not for stream: true; a completion's echo and logprobs stream a prompt's")
    if body.prompt_logprobs is None and isinstance(body, CompletionBody) and body.echo:
        return body.logprobs
    return body.prompt_logprobs


def _grammar(body: GenerationBody) -> tuple[Grammar | None, str]:
    """What the answer must be, and which field says so."""
    found = _grammars(body)
    if not found:
        return None, ""
    (field, grammar), *more = found.items()
    if more:
        raise invalid(more[0][0], f"contradicts {field}: only one of them can say what the answer must be")
    wire_settings.check_grammar(grammar, field)
    return grammar, field


def _grammars(body: GenerationBody) -> dict[str, Grammar]:
    """By field: OpenAI's response_format, our own names, and vLLM's, present and past."""
    structured = body.structured_outputs or StructuredOutputs()
    texts = {
        "regex": (GrammarKind.REGEX, body.regex),
        "guided_regex": (GrammarKind.REGEX, body.guided_regex),
        "structured_outputs.regex": (GrammarKind.REGEX, structured.regex),
        "grammar": (GrammarKind.EBNF, body.grammar),
        "guided_grammar": (GrammarKind.EBNF, body.guided_grammar),
        "structured_outputs.grammar": (GrammarKind.EBNF, structured.grammar),
        "guided_json": (GrammarKind.JSON_SCHEMA, _json(body.guided_json)),
        "structured_outputs.json": (GrammarKind.JSON_SCHEMA, _json(structured.json_)),
        "structural_tag": (GrammarKind.STRUCTURAL_TAG, _json(body.structural_tag)),
        "structured_outputs.structural_tag": (GrammarKind.STRUCTURAL_TAG, _json(structured.structural_tag)),
    }
    choices = {
        "choice": body.choice,
        "guided_choice": body.guided_choice,
        "structured_outputs.choice": structured.choice,
    }
    formatted = _response_format(body)
    found = {} if formatted is None else {"response_format": formatted}
    found |= {field: Grammar(kind, text) for field, (kind, text) in texts.items() if text is not None}
    found |= {field: Grammar(GrammarKind.CHOICE, choices=tuple(given)) for field, given in choices.items() if given is not None}
    if structured.json_object:
        found["structured_outputs.json_object"] = Grammar(GrammarKind.JSON_OBJECT)
    return found


def _json(value: JsonValue | None) -> str | None:
    """As JSON; a string is taken for JSON already."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _response_format(body: GenerationBody) -> Grammar | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT)
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise invalid("response_format.json_schema", "is required with type json_schema")
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(wanted.json_schema.schema_))
    if wanted.structural_tag is None:
        raise invalid("response_format.structural_tag", "is required with type structural_tag")
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(wanted.structural_tag))
