"""Every parameter of a request reaches the verifier, or an error names it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from gateway.http.openai.schema import GenerationBody
from gateway.text.prompts import Prompts
from outrider.errors import OutriderError, Reason
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.protocol.messages import (
    Acceptance,
    AcceptanceRule,
    FinishReason,
    SamplingParams,
    SpeculationStats,
    TokenLogprob,
    TokenRequest,
)
from outrider.v1 import common_pb2, generation_pb2
from tests.gateway.gateway_rig import Rig, model_with_template, own_rig
from tests.gateway.scripted_verifier import Step, last, plain

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT: Any = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def with_logprobs(ids: list[int], *, chunk: int = 2) -> Any:
    """Return a verifier's answer: these tokens, with log probabilities if requested."""

    def answer(request: TokenRequest) -> list[Step]:
        steps = [plain(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
        end = last([3], FinishReason.STOP)
        if request.top_logprobs is not None:
            for step in steps:
                step.logprobs = [
                    TokenLogprob(-0.5, (token, 7), (-0.5, -2.0)) for token in step.token_ids
                ]
            end.logprobs = [TokenLogprob(-0.1, (3, 8), (-0.1, -3.0))]
        return [*steps, end]

    return answer


async def test_every_sampling_setting_reaches_the_verifier(rig: Rig) -> None:
    rig.says("yes")
    extra = {
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "banned_token_ids": [9],
        "top_k": 9,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "speculation": {
            "acceptance": "typical",
            "typical_epsilon": 0.2,
            "drafter_family": "ngram",
            "draft_tokens": 3,
        },
    }
    await rig.client.chat.completions.create(
        model="models/target",
        messages=CHAT,
        max_completion_tokens=5,
        seed=-1,
        top_p=0.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"50": 3, "7": -100},
        extra_body=extra,
    )
    request = rig.script.requests[-1]
    s = request.sampling
    assert (s.min_p, s.typical_p, s.repetition_penalty, s.min_tokens) == (0.1, 0.9, 1.2, 2)
    assert (s.presence_penalty, s.frequency_penalty) == (0.5, -0.5)
    assert (s.top_p, s.top_k, s.seed) == (0.5, 9, 2**64 - 1)
    assert (s.logit_bias, s.banned_token_ids) == (((7, -100.0), (50, 3.0)), (9,))
    assert (request.max_tokens, request.ignore_eos, request.stop_token_ids) == (
        5,
        True,
        frozenset({5}),
    )
    speculation = request.speculation
    assert (speculation.drafter_family, speculation.draft_tokens) == ("ngram", 3)
    assert speculation.acceptance is Acceptance.TYPICAL
    assert speculation.typical_epsilon == 0.2


GRAMMARS: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": {"type": "json_object"}}, Grammar(GrammarKind.JSON_OBJECT)),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    ),
    (
        {"structured_outputs": {"json": '{"type": "null"}'}},
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "null"}'),
    ),
    ({"structured_outputs": {"regex": "[0-9]+"}}, Grammar(GrammarKind.REGEX, "[0-9]+")),
    (
        {"structured_outputs": {"choice": ["yes", "no"]}},
        Grammar(GrammarKind.CHOICE, choices=("yes", "no")),
    ),
    (
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        Grammar(GrammarKind.EBNF, 'root ::= "a"'),
    ),
]


@pytest.mark.parametrize(("body", "grammar"), GRAMMARS, ids=lambda value: str(value)[:40])
async def test_every_form_of_a_grammar_reaches_the_verifier(
    rig: Rig, body: dict[str, Any], grammar: Grammar
) -> None:
    rig.says("x")
    for extra in (body, {**body, "stream": True}):
        response = await rig.http.post("/v1/chat/completions", json={"messages": CHAT, **extra})
        assert response.status_code == 200
        assert rig.script.requests[-1].grammar == grammar


FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
# An API, a request with a grammar, the verifier's name of the grammar, and the caller's field.
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        "json_schema",
        "response_format",
    ),
    (
        "chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        "structural_tag",
        "tools",
    ),
    ("responses", {"input": "hi", "text": {"format": FORM}}, "json_schema", "text.format"),
    (
        "messages",
        {"max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "json_schema",
        "output_config.format",
    ),
]


@pytest.mark.parametrize(("api", "given", "kind", "name"), REFUSED)
async def test_the_error_for_a_bad_grammar_names_the_callers_field(
    rig: Rig, api: str, given: dict[str, Any], kind: str, name: str
) -> None:
    field = f"grammar.{kind}"
    refusal = OutriderError(Reason.INVALID_VALUE, f"{field} has a loop", field)
    body = given if api == "responses" else {"messages": CHAT, **given}
    rig.script.play(refusal)
    for stream in (False, True):
        response = await rig.http.post(f"/v1/{api}", json={**body, "stream": stream})
        error = response.json()["error"]
        assert (response.status_code, error["message"]) == (400, f"{name} has a loop")
        assert error.get("param", name) == name
    rig.script.play(plain([5]), refusal)
    begun = await rig.http.post(f"/v1/{api}", json={**body, "stream": True})
    assert f'"{name} has a loop"' in begun.text


async def test_a_prediction_is_tokenised_as_text(rig: Rig) -> None:
    rig.says("x")
    text = "def add(a, b):\n    return a + b\n"
    parts = [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:]}]
    for content in (text, parts):
        # The client's types allow one form of content at a time.
        prediction: Any = {"type": "content", "content": content}
        await rig.client.chat.completions.create(
            model="models/target",
            messages=CHAT,
            prediction=prediction,
        )
        assert (
            rig.script.requests[-1].prediction
            == rig.prompts.tokenizer.encode(text, add_special_tokens=False).ids
        )


async def test_chat_logprobs_have_openais_shape_and_leave_out_the_end(rig: Rig) -> None:
    ids = rig.says("one two")
    rig.script.answer = with_logprobs(ids)
    answer = await rig.client.chat.completions.create(
        model="models/target", messages=CHAT, logprobs=True, top_logprobs=2
    )
    assert rig.script.requests[-1].top_logprobs == 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == "one two"
    assert [token.logprob for token in logprobs.content] == [-0.5] * len(ids)
    assert [bytes(token.bytes or []).decode() for token in logprobs.content] == [
        token.token for token in logprobs.content
    ]
    assert [top.logprob for top in logprobs.content[0].top_logprobs] == [-0.5, -2.0]


async def test_streamed_logprobs_lose_no_token_even_inside_a_character(rig: Rig) -> None:
    ids = rig.says("naïve 日本語 ok")
    rig.script.answer = with_logprobs(ids, chunk=1)
    stream = await rig.client.chat.completions.create(
        model="models/target", messages=CHAT, logprobs=True, stream=True
    )
    text = ""
    count = 0
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if (found := chunk.choices[0].logprobs) is not None:
            assert found.content is not None
            count += len(found.content)
    assert (text, count) == ("naïve 日本語 ok", len(ids))


async def test_tokens_after_a_stop_string_are_neither_listed_nor_counted(rig: Rig) -> None:
    ids = rig.says("one two three four five")
    rig.script.answer = with_logprobs(ids, chunk=len(ids))
    answer = await rig.client.chat.completions.create(
        model="models/target", messages=CHAT, stop=[" three"], logprobs=True
    )
    assert answer.choices[0].message.content == "one two"
    assert answer.usage is not None
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage.completion_tokens == len(logprobs.content) < len(ids)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (
            [AcceptanceRule.TOKEN_WISE, AcceptanceRule.COUPLED],
            {"rules": ["coupled", "token-wise"], "lossless": True},
        ),
        ([AcceptanceRule.SYNTHETIC], {"rules": ["synthetic"], "lossless": False}),
        ([], None),
    ],
)
async def test_an_answer_names_the_acceptance_rules_of_its_drafts(
    rig: Rig, rules: list[AcceptanceRule], expected: Any
) -> None:
    stats = SpeculationStats(1, 1, 2, 1, [0, 1], 4, rules)
    rig.script.answer = lambda request: [last([3], FinishReason.STOP, stats)]
    answer = await rig.client.chat.completions.create(model="models/target", messages=CHAT)
    assert (answer.model_extra or {}).get("speculation") == expected
    stream = await rig.client.chat.completions.create(
        model="models/target", messages=CHAT, stream=True
    )
    assert [chunk async for chunk in stream][-1].model_dump().get("speculation") == expected


async def test_grpc_has_the_same_settings_and_log_probabilities(rig: Rig) -> None:
    ids = rig.says("one two")
    rig.script.answer = with_logprobs(ids)
    request = generation_pb2.GenerateTextRequest(
        prompt="x",
        top_logprob_count=2,
        grammar=common_pb2.Grammar(choice=common_pb2.Choices(texts=["one two"])),
        prediction="one",
        sampling=common_pb2.SamplingParams(min_p=0.25, logit_bias={5: -1.0}),
        speculation=common_pb2.SpeculationOptions(
            acceptance=common_pb2.ACCEPTANCE_RELAXED, relaxed_top_k=3
        ),
    )
    responses = [response async for response in rig.generation.GenerateText(request)]
    asked = rig.script.requests[-1]
    assert asked.grammar == Grammar(GrammarKind.CHOICE, choices=("one two",))
    assert asked.prediction == rig.prompts.tokenizer.encode("one").ids
    assert (asked.sampling.min_p, asked.sampling.logit_bias) == (0.25, ((5, -1.0),))
    assert (asked.speculation.acceptance, asked.speculation.relaxed_top_k) == (
        Acceptance.RELAXED,
        3,
    )
    assert sum(len(response.logprobs) for response in responses) == len(ids) + 1
    assert list(responses[0].logprobs[0].top_token_ids) == [ids[0], 7]


async def test_every_sampling_parameter_is_in_the_body_under_its_own_name() -> None:
    """A new parameter therefore needs no code between the body and the verifier."""
    names = {field.name for field in fields(SamplingParams) if field.init}
    assert names <= GenerationBody.model_fields.keys()


async def test_special_tokens_are_added_to_a_completions_text_unless_it_says_not(
    tmp_path: Path,
) -> None:
    """The default is vLLM's. A chat gets its special tokens from its template."""
    model = model_with_template(tmp_path, None)
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing("Q $A", special_tokens=[("Q", 7)])
    tokenizer.save(str(path))
    async with own_rig(Prompts(model), tokenizer=model) as rig:
        rig.says("x")
        plain = tokenizer.encode("one two", add_special_tokens=False).ids
        for given, ids in ((None, [7, *plain]), (True, [7, *plain]), (False, plain)):
            body = {"model": "models/target", "prompt": "one two", "add_special_tokens": given}
            answer = await rig.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert rig.script.requests[-1].prompt == ids
            told = await rig.http.post("/tokenize", json=body)
            assert told.json()["tokens"] == ids
