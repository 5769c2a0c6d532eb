"""Coverage-guided fuzzing of the parsers of other processes' bytes, with Atheris (libFuzzer).

Run it with a parser's name, a directory for the inputs that reach new code, and libFuzzer's flags:

    python tests/fuzz/parsers.py request /tmp/inputs -max_total_time=3600

Several names, joined by commas, are fuzzed one after the other.

A parser may refuse bytes. A message that it accepts must not change when it is written and read
again. Anything else ends the run, and libFuzzer leaves the bytes in a file `crash-*` of the working
directory. Given this file in place of the directory, the program reads it alone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import atheris
from google.protobuf.message import DecodeError

sys.path.insert(0, str(Path(__file__).parents[2]))
_OWN = [
    "outrider.protocol.wire",
    "outrider.protocol.checks",
    "gateway.http.json_body",
    "gateway.upstream.chunk_checks",
]
with atheris.instrument_imports(include=_OWN):
    from gateway.http import json_body
    from gateway.upstream import chunk_checks
    from outrider.errors import OutriderError
    from outrider.protocol.model_info import ModelInfo, Stage
    from outrider.protocol.wire import drafts, model, requests
    from outrider.v1 import drafts_pb2, verifier_pb2

_VOCABULARY = 1000
_CONTEXT = 500
_MOST_VALUES = 8
_MOST_TOKENS = 8
_INFO = ModelInfo(
    "a", Stage.READY, vocab_size=_VOCABULARY, context_length=_CONTEXT, max_draft_tokens=8
)


def _check(kind: Any, read: Callable[[Any], Any], write: Callable[[Any], Any], data: bytes) -> None:
    """Read a message of a kind; fails if it changes when it is written and read."""
    once = write(read(kind.FromString(data)))
    twice = write(read(once))
    for batch in (once, twice):
        for proposal in getattr(batch, "proposals", ()):
            # It is a float when it is read, so it may lose a nanosecond.
            proposal.ClearField("draft_duration")
    assert once == twice, (once, twice)


def check_model(data: bytes) -> None:
    """Read a verifier's model, as a gateway does."""
    chunk_checks.check_model(model.model_from_proto(verifier_pb2.GetModelResponse.FromString(data)))


def check_chunk(data: bytes) -> None:
    """Read the tokens that a verifier sends, as a gateway does."""
    chunk = requests.chunk_from_proto(verifier_pb2.GenerateTokensResponse.FromString(data))
    chunk_checks.check_chunk(chunk, _INFO, _MOST_TOKENS, "127.0.0.1:1")
    assert len(chunk.token_ids) <= _MOST_TOKENS
    assert all(token < _VOCABULARY for token in chunk.token_ids)


@atheris.instrument_func
def check_json(data: bytes) -> None:
    """Bound the values of a body, as a gateway does; fails if the count is not exact."""
    try:
        held = _value_count(json.loads(data, object_pairs_hook=_values))
    # Only JSON has a count.
    except (ValueError, RecursionError):
        return
    if not json.detect_encoding(data).startswith("utf-8"):
        return
    is_refused = False
    try:
        json_body.check_size(data, _MOST_VALUES)
    except OutriderError:
        is_refused = True
    assert is_refused == (held > _MOST_VALUES), held


@atheris.instrument_func
def _value_count(value: object) -> int:
    """The values of parsed JSON as `check_size` counts them: an empty list or object is two."""
    if isinstance(value, list):
        return 1 + max(1, sum(map(_value_count, value)))
    return 1


def _values(pairs: list[tuple[str, Any]]) -> list[Any]:
    """The values of an object, also those whose key comes twice."""
    return [value for _, value in pairs]


def check_planted(data: bytes) -> None:
    """Fail for some messages. It shows that the fuzzer notices a failure."""
    hello = drafts.hello_from_proto(drafts_pb2.Hello.FromString(data))
    assert hello.max_draft_tokens < 8, "planted"


_REQUEST = verifier_pb2.GenerateTokensRequest(
    request_id="a",
    prompt_token_ids=[1, 2, 3],
    max_tokens=8,
    stop_token_ids=[4],
    tenant="b",
    top_logprob_count=1,
    prediction_token_ids=[5],
    committed_token_ids=[6],
    noise_seed=7,
    sampling={
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 8,
        "seed": 9,
        "logit_bias": {3: 1.5},
        "banned_token_ids": [7],
    },
    speculation={"drafter_id": "a", "draft_tokens": 4, "acceptance": 2, "typical_epsilon": 0.25},
    grammar={"choice": {"texts": ["a", "b"]}},
)
_CHUNK = verifier_pb2.GenerateTokensResponse(
    token_ids=[1, 2],
    sources=[2, 3],
    drafter_id="a",
    finish_reason=1,
    draft_token_count=3,
    logprobs=[{"logprob": -0.5, "top_token_ids": [1], "top_logprobs": [-0.5], "rank": 1}] * 2,
    stats={"forward_count": 2, "draft_count": 1, "draft_token_count": 3, "max_draft_tokens": 4},
)
_HELLO = drafts_pb2.Hello(
    drafter_id="a", family="b", tokenizer_fingerprint="c", max_draft_tokens=4, distributions=[1, 2]
)
_SPARSE = drafts_pb2.SparseDistribution(token_ids=[2, 4], probabilities=[0.75, 0.25])
_PROPOSAL = drafts_pb2.Proposal(
    sequence_id=1,
    base_length=2,
    token_ids=[2, 4],
    parents=[0, 1],
    distributions=[_SPARSE, _SPARSE],
    confidences=[0.5, 1.0],
)
_DRAFTS = drafts_pb2.DraftBatch(
    proposals=[_PROPOSAL], skips=[drafts_pb2.Skip(sequence_id=3, base_length=4)]
)
_WINDOW = drafts_pb2.Window(token_count=8, depth=4)
_STEP = drafts_pb2.StepBatch(
    opened=[
        drafts_pb2.Opened(
            sequence_id=1,
            token_ids=[1, 2],
            prompt_token_count=2,
            distribution=1,
            draft_tokens=4,
            window=_WINDOW,
            sampling={"temperature": 0.5, "seed": 9},
            grammar={"regex": "a+"},
        )
    ],
    verdicts=[
        drafts_pb2.Verdict(
            sequence_id=1, committed_length=3, new_token_ids=[5], draft_tokens=4, window=_WINDOW
        )
    ],
    closed=[drafts_pb2.Closed(sequence_id=1, reason=1)],
)
_MODEL = verifier_pb2.GetModelResponse(
    model_id="a", stage=3, vocab_size=8, context_length=9, drafters=[{"drafter_id": "b"}]
)

_read_request = partial(
    requests.request_from_proto, vocab_size=_VOCABULARY, context_length=_CONTEXT
)
_read_drafts = partial(drafts.drafts_from_proto, vocab_size=_VOCABULARY)
_read_step = partial(drafts.step_from_proto, vocab_size=_VOCABULARY)

PARSERS: dict[str, tuple[Callable[[bytes], None], bytes]] = {
    "request": (
        partial(_check, type(_REQUEST), _read_request, requests.request_to_proto),
        _REQUEST.SerializeToString(),
    ),
    "hello": (
        partial(_check, type(_HELLO), drafts.hello_from_proto, drafts.hello_to_proto),
        _HELLO.SerializeToString(),
    ),
    "drafts": (
        partial(_check, type(_DRAFTS), _read_drafts, drafts.drafts_to_proto),
        _DRAFTS.SerializeToString(),
    ),
    "step": (
        partial(_check, type(_STEP), _read_step, drafts.step_to_proto),
        _STEP.SerializeToString(),
    ),
    "chunk": (check_chunk, _CHUNK.SerializeToString()),
    "model": (check_model, _MODEL.SerializeToString()),
    "json": (check_json, b'{"a": [1, "b\\"", {}], "c": []}'),
    "planted": (check_planted, _HELLO.SerializeToString()),
}
"""Each parser's check, and an example for the fuzzer to begin with."""


def main() -> None:
    """Fuzz the parsers that the command line names, until an input breaks one of them."""
    names, place, *flags = sys.argv[1:]
    # A refusal may be logged.
    logging.disable()
    for name in names.split(","):
        # libFuzzer ends its process. The imports above take longer than a short run.
        child = os.fork()
        if child == 0:
            fuzz(name, place, flags)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 0:
            sys.exit(f"parser {name} ended with {status}")


def fuzz(name: str, place: str, flags: list[str]) -> NoReturn:
    """Fuzz one parser. libFuzzer ends the process."""
    check, example = PARSERS[name]

    def run(data: bytes) -> None:
        """Check one input. Refusals are what a parser is for."""
        try:
            check(data)
        except (OutriderError, DecodeError):
            pass
        # `check_model` raises it for numbers that no model has.
        except ValueError:
            if name != "model":
                raise

    if not Path(place).is_file():
        Path(place).mkdir(parents=True, exist_ok=True)
        (Path(place) / f"example-{name}").write_bytes(example)
    atheris.Setup([sys.argv[0], place, *flags], run)
    atheris.Fuzz()
    raise AssertionError("libFuzzer has ended the process")


if __name__ == "__main__":
    main()
