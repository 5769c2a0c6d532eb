"""Builds a request's sequences from an HTTP body, and checks each parameter under its HTTP name."""

from __future__ import annotations

import json
from dataclasses import fields, replace

from gateway.http.openai.schema import (
    SEED_MAX,
    SEED_MIN,
    ChatBody,
    CompletionBody,
    GenerationBody,
    JsonValue,
    SpeculationBody,
    StructuredOutputs,
)
from gateway.text.answers import AnswerOptions, asks_for_thought, with_calls_and_thought
from gateway.text.request import AnswerLimit, TextInputs, TextRequest, check_stop
from gateway.tools.definitions import AUTO
from outrider.errors import invalid
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.protocol import messages as m
from outrider.protocol.checks import (
    check_grammar,
    check_logprobs,
    check_sampling,
    check_speculation,
)
from outrider.protocol.limits import MAX_GATHERED_TOKENS, MAX_STOP_TOKENS
from outrider.protocol.model_info import ModelInfo

_COMPLETION_MAX_TOKENS = 16
_LISTED_AT_ONCE = 256


def text_requests(
    body: CompletionBody | ChatBody, inputs: TextInputs, info: ModelInfo
) -> list[TextRequest]:
    """Check the request against a model and build its sequences.

    With a seed s, choice i equals the only choice of a request with seed s + i. Raises
    OutriderError(INVALID_VALUE or CONTEXT_LENGTH_EXCEEDED) that names the field and the limit.
    """
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is only for stream: true")
    if body.speculation.tokens and body.stop:
        message = "does not go with stop, since its tokens may hold text that the stop cuts off"
        raise invalid("speculation.tokens", message)
    template = _template(body, inputs, info)
    sampling = template.tokens.sampling
    at_once = coalesces(body)
    # Each token with log probabilities takes the event loop 30 µs.
    most = MAX_GATHERED_TOKENS if template.tokens.top_logprobs is None else _LISTED_AT_ONCE
    requests = []
    for prompt in inputs.prompts:
        max_tokens = inputs.limit.resolve(prompt, sampling.min_tokens, info)
        tokens = replace(
            template.tokens,
            prompt=prompt.token_ids,
            max_tokens=max_tokens,
            min_chunk_tokens=min(max_tokens, most) if at_once else 1,
            prediction=prompt.prediction[: info.context_length],
        )
        if max_tokens == 0 and tokens.prompt_logprobs is None:
            # The verifier accepts max_tokens=0 only if it scores the prompt.
            tokens = replace(tokens, prompt_logprobs=0)
        request = replace(template, tokens=tokens, echo=prompt.echo)
        if isinstance(body, ChatBody):
            # The request is built once for all choices, since a grammar of many tools takes
            # milliseconds.
            request = with_calls_and_thought(request, _answer_options(body), prompt, inputs.answers)
        for choice in range(inputs.n):
            of_choice = replace(request.tokens, sampling=_with_seed(sampling, choice))
            requests.append(replace(request, tokens=of_choice))
    return requests


def _answer_options(body: ChatBody) -> AnswerOptions:
    outputs = body.structured_outputs or StructuredOutputs()
    return AnswerOptions(
        [tool.tool for tool in body.tools or ()],
        body.tool_choice or AUTO,
        is_parallel=body.parallel_tool_calls is not False,
        splits_thought=body.separate_reasoning is not False,
        shows_thought=body.include_reasoning is not False,
        thinks=asks_for_thought(body.template_variables),
        binds_thought=bool(outputs.enable_in_reasoning),
        continued=(body.messages[-1].content or "") if body.continue_final_message else "",
    )


def coalesces(body: GenerationBody) -> bool:
    """Return whether a chunk may hold the whole answer.

    A chunk may not hold it if the caller reads the answer as it grows or asks for each token's
    source, or if a stop string may end the answer early.
    """
    return not (body.stream or body.stop or body.speculation.tokens)


def answer_limit(body: CompletionBody | ChatBody) -> AnswerLimit:
    """Return the body's limit of tokens, unchecked."""
    scores_prompt = _prompt_alternatives(body) is not None
    if isinstance(body, CompletionBody):
        return AnswerLimit(body.max_tokens, "max_tokens", _COMPLETION_MAX_TOKENS, scores_prompt)
    if body.max_completion_tokens is None:
        return AnswerLimit(body.max_tokens, "max_tokens", None, scores_prompt)
    return AnswerLimit(body.max_completion_tokens, "max_completion_tokens", None, scores_prompt)


def _template(body: CompletionBody | ChatBody, inputs: TextInputs, info: ModelInfo) -> TextRequest:
    """Check and build the part that all sequences of the request share, without a prompt."""
    grammar, grammar_field = _grammar(body)
    sampling = _sampling(body, info.vocab_size)
    stop = check_stop(body.stop)
    speculation = _speculation(body.speculation)
    stop_token_ids = _stop_token_ids(body.stop_token_ids or [], info.vocab_size)
    top_logprobs = _top_logprobs(body)
    prompt_logprobs = _prompt_logprobs(body)
    _check_limit_is_given_once(body)
    tokens = m.TokenRequest(
        prompt=[],
        max_tokens=0,
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        speculation=speculation,
        tenant=inputs.caller.tenant,
        request_id=inputs.caller.request_id,
        traceparent=inputs.caller.traceparent,
        top_logprobs=top_logprobs,
        grammar=grammar,
        prompt_logprobs=prompt_logprobs,
    )
    return TextRequest(
        tokens,
        asked_tokens=inputs.limit.asked,
        stop=stop,
        shows_prompt=prompt_logprobs is not None,
        attributed=body.speculation.tokens,
        grammar_field=grammar_field,
    )


def _check_limit_is_given_once(body: CompletionBody | ChatBody) -> None:
    twice = isinstance(body, ChatBody) and body.max_completion_tokens is not None
    if twice and body.max_tokens is not None:
        raise invalid("max_tokens", "is the old name of max_completion_tokens; send one of them")


def _with_seed(sampling: m.SamplingParams, choice: int) -> m.SamplingParams:
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + choice) % 2**64)


def _sampling(body: GenerationBody, vocab_size: int) -> m.SamplingParams:
    names = [field.name for field in fields(m.SamplingParams) if field.init]
    given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    given["logit_bias"] = _logit_bias(body.logit_bias or {})
    given["banned_token_ids"] = tuple(body.banned_token_ids or ())
    if body.top_k == -1:
        given["top_k"] = 0
    sampling = m.SamplingParams(**given)
    check_sampling(sampling, vocab_size)
    if body.seed is not None and not SEED_MIN <= body.seed <= SEED_MAX:
        raise invalid("seed", f"must be in [{SEED_MIN}, {SEED_MAX}], not {body.seed}")
    return sampling


def _logit_bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Convert OpenAI's object, whose keys are token ids written as strings."""
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
        message = f"must hold at most {MAX_STOP_TOKENS} ids, not {len(ids)}"
        raise invalid("stop_token_ids", message)
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            message = f"must be in [0, {vocab_size}), not {token_id}"
            raise invalid(f"stop_token_ids[{index}]", message)
    return frozenset(ids)


def _top_logprobs(body: CompletionBody | ChatBody) -> int | None:
    """Return how many alternatives the request wants with each token.

    Return None for no log probabilities.
    """
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
    """Return how many alternatives the request wants with each token of the prompt.

    Return None for no scores.
    """
    check_logprobs("prompt_logprobs", body.prompt_logprobs)
    if body.prompt_logprobs is not None and body.stream:
        message = "is not for stream: true; a completion with echo and logprobs streams them"
        raise invalid("prompt_logprobs", message)
    return _prompt_alternatives(body)


def _prompt_alternatives(body: GenerationBody) -> int | None:
    """Return the number of alternatives with each token of the prompt, unchecked.

    With `echo`, a token of the prompt has as many alternatives as a generated token, unless
    `prompt_logprobs` is given.
    """
    if body.prompt_logprobs is None and isinstance(body, CompletionBody) and body.echo:
        return body.logprobs
    return body.prompt_logprobs


def _grammar(body: GenerationBody) -> tuple[Grammar | None, str]:
    """Return the answer's grammar and its field's name; (None, "") if there is no grammar."""
    found = _grammars(body)
    if not found:
        return None, ""
    (field, grammar), *more = found.items()
    if more:
        message = f"contradicts {field}: only one of them can say what the answer must be"
        raise invalid(more[0][0], message)
    check_grammar(grammar, field)
    return grammar, field


def _grammars(body: GenerationBody) -> dict[str, Grammar]:
    """Return all grammars in OpenAI's response_format and vLLM's fields, keyed by field."""
    structured = body.structured_outputs or StructuredOutputs()
    texts = {
        "regex": (GrammarKind.REGEX, structured.regex),
        "grammar": (GrammarKind.EBNF, structured.grammar),
        "json": (GrammarKind.JSON_SCHEMA, _json(structured.json_)),
        "structural_tag": (GrammarKind.STRUCTURAL_TAG, _json(structured.structural_tag)),
    }
    formatted = _response_format(body)
    found = {} if formatted is None else {"response_format": formatted}
    for name, (kind, text) in texts.items():
        if text is not None:
            found[f"structured_outputs.{name}"] = Grammar(kind, text)
    if structured.choice is not None:
        choices = tuple(structured.choice)
        found["structured_outputs.choice"] = Grammar(GrammarKind.CHOICE, choices=choices)
    if structured.json_object:
        found["structured_outputs.json_object"] = Grammar(GrammarKind.JSON_OBJECT)
    return found


def _json(value: JsonValue | None) -> str | None:
    """Return a schema or a structural tag as JSON. A string is taken to be JSON already."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value)


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
