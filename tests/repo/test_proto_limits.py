"""The code enforces exactly the limits that the protos' comments state."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.rpc.chat_input import chat_input
from gateway.text.request import check_stop
from outrider.errors import OutriderError
from outrider.protocol.checks import check_logprobs
from outrider.protocol.wire import drafts as wire_drafts
from outrider.protocol.wire import requests as wire_requests
from outrider.protocol.wire import settings as wire_settings
from outrider.protocol.wire.model import placement_from_proto
from outrider.v1 import common_pb2, drafts_pb2, generation_pb2, verifier_pb2

ROOT = Path(__file__).parents[2]
VOCAB = 5000
MAX_TOKENS = 2000
FIELD = re.compile(r"^(?:optional |repeated )?[\w.<>, ]+ (\w+) = \d+;$")
RANGE = re.compile(r"Range ([\[(])([^,]+), ([^\])]+)\]")
COUNT = re.compile(r"\b(?:(\d+) to|[Aa]t most) (\d+)\b(?! MiB)")
DEPTH = 100
NAMES = {"vocabulary size": VOCAB, "max_tokens": MAX_TOKENS, "window.depth": DEPTH}


@dataclass(frozen=True)
class Limit:
    """A documented range of a field's value.

    If `counts`, the range is that of its number of entries or characters.
    """

    field: str
    low: float
    high: float
    counts: bool = False
    low_is_open: bool = False


def limits() -> list[Limit]:
    """Return the limits of all fields in the protos."""
    found: list[Limit] = []
    for path in sorted((ROOT / "protos/outrider/v1").glob("*.proto")):
        message = comment = ""
        for line in map(str.strip, path.read_text().splitlines()):
            if line.startswith("//"):
                comment += line.removeprefix("//")
                continue
            if opens := re.match(r"message (\w+) \{", line):
                message = opens[1]
            if field := FIELD.match(line):
                found += stated(f"{message}.{field[1]}", comment)
            comment = ""
    return found


def stated(field: str, comment: str) -> list[Limit]:
    if ranged := RANGE.search(comment):
        bracket, low, high = ranged.groups()
        least, most = (float(NAMES.get(bound, bound)) for bound in (low, high))
        return [Limit(field, least, most, low_is_open=bracket == "(")]
    counted = COUNT.search(comment)
    if counted is None:
        return []
    return [Limit(field, float(counted[1] or 0), float(counted[2]), counts=True)]


def request(**fields: Any) -> object:
    given = {"prompt_token_ids": [1], "max_tokens": MAX_TOKENS} | fields
    proto = verifier_pb2.GenerateTokensRequest(**given)
    return wire_requests.request_from_proto(proto, vocab_size=VOCAB, context_length=10_000)


def sampling(**fields: Any) -> object:
    return request(sampling=common_pb2.SamplingParams(**fields))


def speculation(**fields: Any) -> object:
    return wire_settings.speculation_from_proto(common_pb2.SpeculationOptions(**fields))


def hello(**fields: Any) -> object:
    given = {
        "drafter_id": "d",
        "family": "f",
        "tokenizer_fingerprint": "t",
        "max_draft_tokens": 1,
    } | fields
    return wire_drafts.hello_from_proto(drafts_pb2.Hello(**given))


def features(**fields: Any) -> object:
    wanted = drafts_pb2.FeatureRequest(**fields)
    return hello(capabilities=[drafts_pb2.CAPABILITY_FEATURES], feature_request=wanted)


def drafts(**fields: Any) -> object:
    return wire_drafts.drafts_from_proto(drafts_pb2.DraftBatch(**fields), VOCAB)


def distribution(count: int) -> object:
    shares = [1 / count for _ in range(count)]
    given = drafts_pb2.SparseDistribution(token_ids=range(count), probabilities=shares)
    proposal = drafts_pb2.Proposal(base_length=1, token_ids=[0], distributions=[given])
    return wire_drafts.drafts_from_proto(drafts_pb2.DraftBatch(proposals=[proposal]), VOCAB)


def step(**fields: Any) -> object:
    return wire_drafts.step_from_proto(drafts_pb2.StepBatch(**fields), VOCAB)


def opened(window: dict[str, int] | None = None, **fields: int) -> object:
    place = drafts_pb2.Window(**({"token_count": 1, "depth": 1} | (window or {})))
    return step(opened=[drafts_pb2.Opened(token_ids=[1], window=place, **fields)])


def verdict(window: dict[str, int], **fields: int) -> object:
    place = drafts_pb2.Window(token_count=1, **window)
    return step(verdicts=[drafts_pb2.Verdict(window=place, **fields)])


def grammar(**fields: Any) -> object:
    return wire_settings.grammar_from_proto(common_pb2.Grammar(**fields))


def chat(tool_names: Sequence[str]) -> object:
    message = generation_pb2.ChatMessage(role="user", content="x")
    tools = [generation_pb2.Tool(name=name) for name in tool_names]
    return chat_input(generation_pb2.Chat(messages=[message], tools=tools))


def named(build: Callable[..., object], field: str) -> Callable[[Any], object]:
    return lambda value: build(**{field: value})


SAMPLING = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
]
SAMPLING += ["frequency_penalty", "min_tokens"]
SPECULATION = ["draft_tokens", "typical_epsilon", "relaxed_top_k", "relaxed_delta"]
# For each limit, a function that reads a message whose field has the given value or number of
# entries.
READERS: dict[str, Callable[[Any], object]] = {
    **{f"SamplingParams.{name}": named(sampling, name) for name in SAMPLING},
    "SamplingParams.logit_bias": lambda n: sampling(logit_bias=dict.fromkeys(range(n), 0.5)),
    "SamplingParams.banned_token_ids": lambda n: sampling(banned_token_ids=range(n)),
    **{f"SpeculationOptions.{name}": named(speculation, name) for name in SPECULATION},
    "SpeculationOptions.drafter_id": lambda n: speculation(drafter_id="d" * n),
    "SpeculationOptions.drafter_family": lambda n: speculation(drafter_family="f" * n),
    "Chat.tools": lambda n: chat([f"t{i}" for i in range(n)]),
    "Tool.name": lambda n: chat(["a" * n]),
    "Choices.texts": lambda n: grammar(choice=common_pb2.Choices(texts=["a"] * n)),
    "Placement.cores": lambda n: placement_from_proto(common_pb2.Placement(cores=range(n))),
    "Placement.numa_node": lambda node: placement_from_proto(common_pb2.Placement(numa_node=node)),
    "Hello.drafter_id": lambda n: hello(drafter_id="d" * n),
    "Hello.family": lambda n: hello(family="f" * n),
    "Hello.weights_version": lambda n: hello(weights_version="v" * n),
    "Hello.max_draft_tokens": named(hello, "max_draft_tokens"),
    "FeatureRequest.aux_layers": lambda n: features(aux_layers=range(n), final_state=True),
    "FeatureRequest.projection": lambda n: features(final_state=True, projection="p" * n),
    "Window.token_count": lambda value: opened({"token_count": value}),
    "Window.depth": lambda value: opened({"depth": value}),
    "Opened.draft_tokens": lambda value: opened({"depth": DEPTH}, draft_tokens=value),
    "Opened.tree_tokens": lambda value: opened(tree_tokens=value),
    "Verdict.draft_tokens": lambda value: verdict({"depth": DEPTH}, draft_tokens=value),
    "Verdict.tree_tokens": lambda value: step(verdicts=[drafts_pb2.Verdict(tree_tokens=value)]),
    "SparseDistribution.token_ids": distribution,
    "Proposal.token_ids": lambda n: drafts(proposals=[drafts_pb2.Proposal(token_ids=[1] * n)]),
    "Proposal.confidences": lambda value: drafts(
        proposals=[drafts_pb2.Proposal(token_ids=[1], confidences=[value])]
    ),
    "DraftBatch.proposals": lambda n: drafts(skips=[drafts_pb2.Skip()] * n),
    "GenerateTextRequest.stop": lambda n: check_stop(["a"] * n),
    "GenerateTextRequest.top_logprob_count": partial(check_logprobs, "top_logprob_count"),
    "GenerateTextRequest.prompt_logprob_count": partial(check_logprobs, "prompt_logprob_count"),
    "GenerateTokensRequest.request_id": lambda n: request(request_id="a" * n),
    "GenerateTokensRequest.tenant": lambda n: request(tenant="a" * n),
    "GenerateTokensRequest.stop_token_ids": lambda n: request(stop_token_ids=[1] * n),
    "GenerateTokensRequest.top_logprob_count": named(request, "top_logprob_count"),
    "GenerateTokensRequest.prompt_logprob_count": named(request, "prompt_logprob_count"),
}
LIMITS = limits()


def test_every_limit_in_a_comment_has_a_test() -> None:
    assert {limit.field for limit in LIMITS} == set(READERS)


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.field)
def test_values_are_accepted_exactly_within_the_documented_limits(limit: Limit) -> None:
    read = READERS[limit.field]
    is_whole = limit.counts or whole(read, limit)
    kind = int if is_whole else float
    step = 1.0 if is_whole else 1e-6
    inside = [limit.high] if limit.low_is_open else [limit.high, limit.low]
    for value in inside:
        read(kind(value))
    below = limit.low if limit.low_is_open else limit.low - step
    outside = [(limit.high + step, limit.high), (below, limit.low)]
    for value, bound in outside:
        if limit.counts and value < 0:
            continue
        with pytest.raises(OutriderError) as caught:
            read(kind(value))
        assert caught.value.field is not None
        assert f"{bound:g}" in caught.value.message


def whole(read: Callable[[Any], object], limit: Limit) -> bool:
    """True if the field takes only whole numbers: protobuf raises TypeError for other numbers."""
    try:
        read(limit.high - 0.5)
    except TypeError:
        return True
    except OutriderError:
        return False
    return False
