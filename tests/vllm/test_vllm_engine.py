"""vLLM's engine writes the target's texts, whatever drafters do."""

import asyncio
import functools
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from outrider.errors import Reason
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.internal.v1 import token_streams_pb2, token_streams_pb2_grpc
from outrider.process.network.ports import free_port
from outrider.protocol.messages import (
    FinishReason,
    SamplingParams,
    SpeculationOptions,
    TokenChunk,
    TokenRequest,
)
from outrider.protocol.wire import requests as wire_requests
from outrider.v1 import drafts_pb2
from tests.e2e.test_greedy_equality import Reference
from tests.raw_drafter import RawDrafter
from tests.stack import Client, Stack, running
from tests.vllm.conftest import FLAGS, START_S
from tests.waiting import until

TOKENS = 48
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = range(0, 40, 2)
CONFIGURATIONS = {
    "no drafter": SpeculationOptions(enabled=False),
    "ngram": SpeculationOptions(drafter_id="ngram-1", always_draft=True),
    "model": SpeculationOptions(drafter_id="model-1", always_draft=True),
    "head": SpeculationOptions(drafter_id="head-1", always_draft=True),
    "all at once": SpeculationOptions(always_draft=True),
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


def asked(prompt: list[int], options: SpeculationOptions, **fields: object) -> TokenRequest:
    known = {"max_tokens": TOKENS, "sampling": GREEDY, "speculation": options} | fields
    return TokenRequest(prompt, **known)  # type: ignore[arg-type]


async def texts(client: Client, requests: list[TokenRequest]) -> list[list[int]]:
    return await asyncio.gather(*(client.tokens(request) for request in requests))


@functools.cache
def _whole(reference: Reference, index: int) -> list[int]:
    return reference.generate(index)


def check(reference: Reference, index: int, tokens: list[int]) -> None:
    """Check that the tokens are the tokens of `generate`, or their beginning."""
    prompt = reference.prompts[index]
    whole = _whole(reference, index)[: len(tokens)]
    assert tokens == whole, f"prompt {index}, {len(prompt)} tokens"


def drafted(chunks: list[TokenChunk]) -> int:
    return sum(chunk.draft_token_count for chunk in chunks)


@pytest.mark.parametrize("name", CONFIGURATIONS)
async def test_greedy_texts_are_those_of_transformers(
    stack: Stack, reference: Reference, name: str
) -> None:
    """Some prompts are longer than a step may be, so vLLM reads them in chunks."""
    async with Client(stack.address) as client:
        requests = [asked(reference.prompts[i], CONFIGURATIONS[name]) for i in PROMPTS]
        answers = await asyncio.gather(*(client.generate(request) for request in requests))
    for index, chunks in zip(PROMPTS, answers, strict=True):
        check(reference, index, [token for chunk in chunks for token in chunk.token_ids])
    proposals = sum(map(drafted, answers))
    assert proposals == 0 if name == "no drafter" else proposals > 100


Answer = Callable[[int, int], drafts_pb2.Proposal | None]
"""A drafter's message about a sequence and its length; None is silence."""


def wrong(sequence_id: int, length: int) -> drafts_pb2.Proposal:
    """Return random ids."""
    ids = [random.randrange(4096) for _ in range(8)]
    return drafts_pb2.Proposal(sequence_id=sequence_id, base_length=length, token_ids=ids)


def garbage(sequence_id: int, length: int) -> drafts_pb2.Proposal:
    """Return ids beyond the vocabulary."""
    ids = [4096, 2**31 - 1]
    return drafts_pb2.Proposal(sequence_id=sequence_id, base_length=length, token_ids=ids)


def silent(sequence_id: int, length: int) -> None:
    """Do nothing: the drafter hangs."""


async def draft(drafter: RawDrafter, answer: Answer, delay_s: float) -> None:
    """Answer each sequence and verdict until the stream ends."""
    lengths: dict[int, int] = {}
    while True:
        message = await drafter.call.read()
        if not hasattr(message, "step"):
            return
        for opened in message.step.opened:
            lengths[opened.sequence_id] = len(opened.token_ids)
        for verdict in message.step.verdicts:
            lengths[verdict.sequence_id] = verdict.committed_length
        told = {each.sequence_id for each in (*message.step.opened, *message.step.verdicts)}
        found = [answer(i, lengths[i]) for i in told]
        proposals = [proposal for proposal in found if proposal is not None]
        if proposals:
            await asyncio.sleep(delay_s)
            await drafter.say(drafts=drafts_pb2.DraftBatch(proposals=proposals))


@asynccontextmanager
async def drafting(
    client: Client, name: str, answer: Answer, delay_s: float
) -> AsyncIterator[None]:
    async with client.drafter(name, family=name) as drafter:
        work = asyncio.create_task(draft(drafter, answer, delay_s))
        try:
            yield
        finally:
            work.cancel()
            await asyncio.wait([work])


@pytest.mark.parametrize(
    ("answer", "delay_s"),
    [(wrong, 0.0), (wrong, 0.06), (garbage, 0.0), (silent, 0.0)],
    ids=["wrong", "late", "garbage", "hung"],
)
async def test_a_bad_drafter_changes_no_text(
    stack: Stack, reference: Reference, answer: Answer, delay_s: float
) -> None:
    async with Client(stack.address) as client:
        async with drafting(client, "bad", answer, delay_s):
            options = SpeculationOptions(drafter_id="bad")
            requests = [asked(reference.prompts[i], options) for i in PROMPTS[:8]]
            answers = await texts(client, requests)
        for index, tokens in zip(PROMPTS[:8], answers, strict=True):
            check(reference, index, tokens)


async def test_a_drafter_of_another_tokenizer_is_refused(stack: Stack) -> None:
    async with (
        Client(stack.address) as client,
        client.drafter("foreign", tokenizer_fingerprint="0" * 64) as drafter,
    ):
        assert (await drafter.error()).reason is Reason.TOKENIZER_MISMATCH


async def test_texts_stay_the_same_while_drafters_are_killed(
    stack: Stack, reference: Reference
) -> None:
    async def kill() -> None:
        for name in ("ngram-1", "model-1"):
            await asyncio.sleep(0.5)
            stack.drafters[name].kill()

    async with Client(stack.address) as client:
        options = CONFIGURATIONS["all at once"]
        requests = [asked(reference.prompts[i], options) for i in PROMPTS]
        answers, _ = await asyncio.gather(texts(client, requests), kill())
    for index, tokens in zip(PROMPTS, answers, strict=True):
        check(reference, index, tokens)
    for name in ("ngram-1", "model-1"):
        stack.drafters[name].start()
    stack.wait_ready()


@pytest.mark.parametrize("name", CONFIGURATIONS)
async def test_a_schema_holds_with_any_drafter(
    stack: Stack, reference: Reference, name: str
) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    async with Client(stack.address) as client:
        request = asked(reference.prompts[26], CONFIGURATIONS[name], grammar=grammar)
        plain = asked(reference.prompts[26], CONFIGURATIONS["no drafter"], grammar=grammar)
        answers = await texts(client, [request, plain])
    assert answers[0] == answers[1]
    assert len(answers[0]) > 5


OTHER_END = 3
GRAMMARS = [
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Grammar(GrammarKind.JSON_OBJECT),
    Grammar(GrammarKind.REGEX, "[a-z ]{3,9}(, [a-z ]{3,9}){2}"),
    Grammar(GrammarKind.CHOICE, choices=("yes, of course", "no", "not today")),
    Grammar(GrammarKind.EBNF, 'root ::= "(" root ")" | [a-z]+'),
    Grammar(
        GrammarKind.STRUCTURAL_TAG,
        json.dumps(
            {
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<f>",
                    "content": {"type": "json_schema", "json_schema": SCHEMA, "style": "qwen_xml"},
                    "end": "</f>",
                },
            }
        ),
    ),
]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind.value)
async def test_a_seed_gives_the_native_engines_text_of_a_grammar(
    stack: Stack, native: Stack, reference: Reference, grammar: Grammar
) -> None:
    requests = [
        asked(
            reference.prompts[index],
            CONFIGURATIONS["all at once"],
            grammar=grammar,
            sampling=SamplingParams(temperature=1.0, seed=index),
        )
        for index in range(8)
    ]
    found = []
    for each in (stack, native):
        async with Client(each.address) as client:
            found.append(await texts(client, requests))
    for theirs, ours in zip(*found, strict=True):
        # vLLM ends a grammar's text only with the tokenizer's end token. The bundled target has
        # another end token too; where our engine draws that, vLLM may go on.
        assert theirs[: len(ours) - 1] == ours[:-1]
        assert len(theirs) == len(ours) or ours[-1] == OTHER_END
    assert len({tuple(text) for text in found[0]}) > 1


async def test_log_probabilities_are_those_of_the_native_engine(
    stack: Stack, native: Stack, reference: Reference
) -> None:
    request = asked(
        reference.prompts[4], CONFIGURATIONS["all at once"], top_logprobs=3, prompt_logprobs=2
    )
    found = []
    for each in (stack, native):
        async with Client(each.address) as client:
            found.append(await client.generate(request))
    for name in ("logprobs", "prompt_logprobs"):
        ours, theirs = (
            [entry for chunk in chunks for entry in getattr(chunk, name)] for chunks in found
        )
        assert len(ours) == len(theirs) > 0
        for own, other in zip(ours, theirs, strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert own.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-3)


async def test_seeded_texts_are_those_of_the_native_engine(
    stack: Stack, native: Stack, reference: Reference
) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, min_p=0.02, repetition_penalty=1.1)
    found = []
    for each, name in ((native, "no drafter"), *((stack, name) for name in CONFIGURATIONS)):
        requests = [
            asked(reference.prompts[i], CONFIGURATIONS[name], sampling=replace(sampling, seed=i))
            for i in PROMPTS
        ]
        async with Client(each.address) as client:
            found.append(await texts(client, requests))
    assert all(each == found[0] for each in found)
    assert len({tuple(text) for text in found[0]}) == len(PROMPTS)


async def test_tenants_share_no_cached_prefix(stack: Stack, reference: Reference) -> None:
    prompt = [*range(100, 400)]

    async def cached(tenant: str) -> int:
        async with Client(stack.address) as client:
            chunks = await client.generate(
                asked(prompt, CONFIGURATIONS["no drafter"], max_tokens=2, tenant=tenant)
            )
        return chunks[-1].cached_token_count

    assert await cached("a") == 0
    assert await cached("a") > 200
    assert await cached("b") == 0


async def is_idle(client: Client) -> bool:
    """True if the engine has no sequence."""
    load = (await client.model()).load
    return load is not None and load.running + load.waiting == 0


async def test_a_cancelled_request_frees_its_place(stack: Stack, reference: Reference) -> None:
    async with Client(stack.address) as client:
        request = asked(reference.prompts[0], CONFIGURATIONS["all at once"], max_tokens=600)

        async def leave() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await client.generate(request)

        await asyncio.gather(*(leave() for _ in range(4)))
        await until(lambda: is_idle(client))


async def test_a_caller_that_stops_reading_gets_the_same_text_later(
    stack: Stack, reference: Reference
) -> None:
    """While the answer is unread, vLLM drops the sequence. Later vLLM continues it."""
    request = asked(reference.prompts[0], CONFIGURATIONS["ngram"], max_tokens=400, ignore_eos=True)
    text: list[int] = []
    async with Client(stack.address) as client:
        whole = await client.tokens(request)
        call = token_streams_pb2_grpc.TokenStreamServiceStub(client.channel).StreamTokens()

        async def say(**message: Any) -> None:
            told = token_streams_pb2.SequenceRequest(call_id=1, **message)
            await call.write(token_streams_pb2.StreamTokensRequest(requests=[told]))

        async def read() -> bool:
            """Read a message; return whether it ends the sequence."""
            parts = (await call.read()).parts
            chunks = [wire_requests.chunk_from_proto(part.tokens) for part in parts]
            text.extend(token for chunk in chunks for token in chunk.token_ids)
            return any(chunk.finish_reason is not None for chunk in chunks)

        await say(generate=wire_requests.request_to_proto(request))
        await read()
        await say(pause=token_streams_pb2.PauseTokens())
        await until(lambda: is_idle(client))
        await say(resume=token_streams_pb2.ResumeTokens())
        while not await read():
            pass
        call.cancel()
    assert text == whole
    assert len(whole) == 400


async def test_a_refused_request_keeps_no_place(stack: Stack, reference: Reference) -> None:
    grammar = Grammar(GrammarKind.REGEX, "a+")
    async with Client(stack.address) as client:
        scores = {"max_tokens": 0, "prompt_logprobs": 0}
        for fields in (scores, {"grammar": grammar, "ignore_eos": True}):
            with pytest.raises(Exception, match="engine"):
                await client.tokens(
                    asked(reference.prompts[0], CONFIGURATIONS["no drafter"], **fields)
                )
        load = (await client.model()).load
    assert load is not None
    assert load.running + load.waiting == 0


async def test_a_text_ends_where_the_context_does(stack: Stack, reference: Reference) -> None:
    prompt = [7] * 1000
    async with Client(stack.address) as client:
        request = asked(prompt, CONFIGURATIONS["all at once"], max_tokens=24, ignore_eos=True)
        plain = asked(prompt, CONFIGURATIONS["no drafter"], max_tokens=24, ignore_eos=True)
        answers = await texts(client, [request, plain])
        assert answers[0] == answers[1]
        assert len(answers[0]) == 24
        with pytest.raises(Exception, match="1024"):
            await client.tokens(asked(prompt, CONFIGURATIONS["ngram"], max_tokens=25))


async def test_an_answer_goes_on_behind_committed_tokens(
    stack: Stack, reference: Reference
) -> None:
    whole = reference.generate(2)
    async with Client(stack.address) as client:
        request = asked(
            reference.prompts[2], CONFIGURATIONS["ngram"], max_tokens=40, committed=whole[:15]
        )
        chunks = await client.generate(request)
    assert [token for chunk in chunks for token in chunk.token_ids] == whole[15:40]
    assert chunks[-1].finish_reason is FinishReason.LENGTH


def preemptions(port: int) -> float:
    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    [line] = re.findall(r"^outrider:num_preemptions_total\{.*\} (\S+)$", page, re.MULTILINE)
    return float(line)


@pytest.mark.slow
async def test_drafts_preempt_nobody(reference: Reference) -> None:
    """With pages for only a few requests, vLLM preempts as often as without drafts."""
    counts = {}
    for name in ("no drafter", "wrong"):
        port = free_port()
        pages = {"num_gpu_blocks_override": 20, "block_size": 32, "max_model_len": 512}
        flags = [word for key in pages for word in ("--engine-arg", f"{key}={pages[key]}")]
        stack = Stack(*FLAGS, *flags, "--metrics-port", str(port))
        with running(stack, START_S):
            async with Client(stack.address) as client:
                requests = [
                    asked(reference.prompts[i], SpeculationOptions(), max_tokens=100)
                    for i in PROMPTS[:8]
                ]
                async with drafting(client, "bad", wrong if name == "wrong" else silent, 0.0):
                    answers = await texts(client, requests)
            counts[name] = preemptions(port)
        for index, tokens in zip(PROMPTS[:8], answers, strict=True):
            check(reference, index, tokens[:TOKENS])
    assert counts["wrong"] == counts["no drafter"] > 0
