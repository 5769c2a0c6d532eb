"""From an HTTP body to the request's sequences, each parameter checked under the caller's name. Knows no gRPC and no replica."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace

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
from outrider import messages as m
from outrider.checks import check_grammar, check_logprobs, check_sampling, check_speculation
from outrider.errors import invalid
from outrider.limits import MAX_STOP_TOKENS
from outrider.model_info import ModelInfo

_COMPLETION_MAX_TOKENS = 16


def text_requests(
    body: CompletionBody | ChatBody,
    prompts: Sequence[Prompt],
    n: int,
    caller: Caller,
    info: ModelInfo,
) -> list[TextRequest]:
    """The request's sequences, n for each prompt, checked against a model.

    With a seed s, choice i is what a request for one choice with seed s + i would give.
    Raises OutriderError(INVALID_VALUE or CONTEXT_LENGTH_EXCEEDED) that names the field and the limit.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is only for stream: true")
    if body.speculation.tokens and body.stop:
        raise invalid(
            "speculation.tokens",
            "does not go with stop, since tokens may hold a part of what is cut off",
        )
    grammar, grammar_field = _grammar(body)
    sampling, stop, speculation = (
        _sampling(body, info.vocab_size),
        check_stop(body.stop),
        _speculation(body.speculation),
    )
    stop_token_ids = _stop_token_ids(body.stop_token_ids or [], info.vocab_size)
    top_logprobs, prompt_logprobs = _top_logprobs(body), _prompt_logprobs(body)
    scores_prompt = prompt_logprobs is not None
    limit = _answer_limit(body, scores_prompt)
    # Only a whole answer may come at once, and a stop string has to be looked for as the text grows.
    at_once = not body.stream and not stop and not body.speculation.tokens

    def build(prompt: Prompt, max_tokens: int, choice: int) -> TextRequest:
        tokens = m.TokenRequest(
            prompt=prompt.token_ids,
            max_tokens=max_tokens,
            sampling=sampling
            if sampling.seed is None
            else replace(sampling, seed=(sampling.seed + choice) % 2**64),
            stop_token_ids=stop_token_ids,
            ignore_eos=bool(body.ignore_eos),
            speculation=speculation,
            tenant=caller.tenant,
            request_id=caller.request_id,
            traceparent=caller.traceparent,
            min_chunk_tokens=max_tokens if at_once else 1,
            top_logprobs=top_logprobs,
            grammar=grammar,
            prediction=prompt.prediction[: info.context_length],
            # A verifier generates nothing only for a prompt that it scores.
            prompt_logprobs=0 if max_tokens == 0 and not scores_prompt else prompt_logprobs,
        )
        return TextRequest(
            tokens,
            limit.asked,
            stop,
            prompt.echo,
            scores_prompt,
            body.speculation.tokens,
            grammar_field,
        )

    fitted = [(prompt, limit.resolve(prompt, sampling.min_tokens, info)) for prompt in prompts]
    return [
        build(prompt, max_tokens, choice) for prompt, max_tokens in fitted for choice in range(n)
    ]


def _answer_limit(body: CompletionBody | ChatBody, scores_prompt: bool) -> AnswerLimit:
    asked, field_name = body.max_tokens, "max_tokens"
    if isinstance(body, CompletionBody):
        return AnswerLimit(asked, field_name, _COMPLETION_MAX_TOKENS, scores_prompt)
    if body.max_completion_tokens is not None:
        if asked is not None:
            raise invalid(
                "max_tokens", "is the old name of max_completion_tokens; send one of them"
            )
        asked, field_name = body.max_completion_tokens, "max_completion_tokens"
    return AnswerLimit(asked, field_name, None, scores_prompt)


def _sampling(body: GenerationBody, vocab_size: int) -> m.SamplingParams:
    named = [
        (field.name, getattr(body, field.name)) for field in fields(m.SamplingParams) if field.init
    ]
    given = {name: value for name, value in named if value is not None}
    given |= {
        "logit_bias": _logit_bias(body.logit_bias or {}),
        "banned_token_ids": tuple(body.banned_token_ids or ()),
    }
    if body.top_k == -1:
        given["top_k"] = 0
    sampling = m.SamplingParams(**given)
    check_sampling(sampling, vocab_size)
    if body.seed is not None and not SEED_MIN <= body.seed <= SEED_MAX:
        raise invalid("seed", f"must be in [{SEED_MIN}, {SEED_MAX}], not {body.seed}")
    return sampling


def _logit_bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """OpenAI's object, whose keys are token ids written as strings."""
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid("logit_bias", f"must have token ids as keys, not {key[:40]!r}")
    pairs = {int(key): value for key, value in given.items()}
    if len(pairs) < len(given):
        raise invalid("logit_bias", "has a token id twice")
    return tuple(sorted(pairs.items()))


def _speculation(body: SpeculationBody) -> m.SpeculationOptions:
    given = {field.name: getattr(body, field.name) for field in fields(m.SpeculationOptions)}
    options = m.SpeculationOptions(**given | {"acceptance": m.Acceptance[body.acceptance.upper()]})
    check_speculation(options)
    return options


def _stop_token_ids(ids: list[int], vocab_size: int) -> frozenset[int]:
    if len(ids) > MAX_STOP_TOKENS:
        raise invalid("stop_token_ids", f"must hold at most {MAX_STOP_TOKENS} ids, not {len(ids)}")
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"stop_token_ids[{index}]", f"must be in [0, {vocab_size}), not {token_id}"
            )
    return frozenset(ids)


def _top_logprobs(body: CompletionBody | ChatBody) -> int | None:
    """How many of the likeliest tokens are wanted with each; None for no log probabilities at all."""
    if isinstance(body, CompletionBody):
        check_logprobs("logprobs", body.logprobs)
        return body.logprobs
    check_logprobs("top_logprobs", body.top_logprobs)
    if not body.logprobs:
        if body.top_logprobs:
            raise invalid("top_logprobs", "is only for logprobs: true")
        return None
    return body.top_logprobs or 0


def _prompt_logprobs(body: GenerationBody) -> int | None:
    """The same for the prompt's tokens, which an echo shows as it shows the others unless told otherwise."""
    check_logprobs("prompt_logprobs", body.prompt_logprobs)
    if body.prompt_logprobs is not None and body.stream:
        raise invalid(
            "prompt_logprobs",
            "is not for stream: true; a completion's echo and logprobs stream a prompt's",
        )
    if body.prompt_logprobs is None and isinstance(body, CompletionBody) and body.echo:
        return body.logprobs
    return body.prompt_logprobs


def _grammar(body: GenerationBody) -> tuple[m.Grammar | None, str]:
    """What the answer must be, and which field says so."""
    found = _grammars(body)
    if not found:
        return None, ""
    (field, grammar), *more = found.items()
    if more:
        raise invalid(
            more[0][0], f"contradicts {field}: only one of them can say what the answer must be"
        )
    check_grammar(grammar, field)
    return grammar, field


def _grammars(body: GenerationBody) -> dict[str, m.Grammar]:
    """By field: OpenAI's response_format, our own names, and vLLM's, present and past."""
    structured = body.structured_outputs or StructuredOutputs()
    texts = {
        "regex": (m.GrammarKind.REGEX, body.regex),
        "guided_regex": (m.GrammarKind.REGEX, body.guided_regex),
        "structured_outputs.regex": (m.GrammarKind.REGEX, structured.regex),
        "grammar": (m.GrammarKind.EBNF, body.grammar),
        "guided_grammar": (m.GrammarKind.EBNF, body.guided_grammar),
        "structured_outputs.grammar": (m.GrammarKind.EBNF, structured.grammar),
        "guided_json": (m.GrammarKind.JSON_SCHEMA, _json(body.guided_json)),
        "structured_outputs.json": (m.GrammarKind.JSON_SCHEMA, _json(structured.json_)),
        "structural_tag": (m.GrammarKind.STRUCTURAL_TAG, _json(body.structural_tag)),
        "structured_outputs.structural_tag": (
            m.GrammarKind.STRUCTURAL_TAG,
            _json(structured.structural_tag),
        ),
    }
    choices = {
        "choice": body.choice,
        "guided_choice": body.guided_choice,
        "structured_outputs.choice": structured.choice,
    }
    formatted = _response_format(body)
    found = {} if formatted is None else {"response_format": formatted}
    found |= {
        field: m.Grammar(kind, text) for field, (kind, text) in texts.items() if text is not None
    }
    found |= {
        field: m.Grammar(m.GrammarKind.CHOICE, choices=tuple(given))
        for field, given in choices.items()
        if given is not None
    }
    if structured.json_object:
        found["structured_outputs.json_object"] = m.Grammar(m.GrammarKind.JSON_OBJECT)
    return found


def _json(value: JsonValue | None) -> str | None:
    """As JSON; a string is taken for JSON already."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _response_format(body: GenerationBody) -> m.Grammar | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return m.Grammar(m.GrammarKind.JSON_OBJECT)
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise invalid("response_format.json_schema", "is required with type json_schema")
        return m.Grammar(m.GrammarKind.JSON_SCHEMA, json.dumps(wanted.json_schema.schema_))
    if wanted.structural_tag is None:
        raise invalid("response_format.structural_tag", "is required with type structural_tag")
    return m.Grammar(m.GrammarKind.STRUCTURAL_TAG, json.dumps(wanted.structural_tag))
