"""A text continues only on a verifier with the same weights, dtype, settings and version."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest

from outrider import __version__
from outrider.errors import Reason
from outrider.process.network import rpc_errors
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from outrider.protocol.model_info import ModelInfo, Stage, with_fingerprint
from tests.stack import Client, Stack

ASKED = TokenRequest(
    [5, 6, 7],
    48,
    SamplingParams(0.0),
    speculation=SpeculationOptions(enabled=False),
    ignore_eos=True,
)


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"weights_fingerprint": "other"}, True),
        ({"dtype": "bfloat16"}, True),
        ({"acceptance_settings": (("sampled_rule", "token-wise"),)}, True),
        ({"server_version": "0"}, True),
        ({"context_length": 9, "device": "cuda", "max_draft_tokens": 1}, False),
    ],
)
def test_a_fingerprint_covers_what_decides_the_text(changes: dict[str, Any], differs: bool) -> None:
    info = ModelInfo("m", Stage.READY, dtype="float32", weights_fingerprint="w")
    one, other = with_fingerprint(info), with_fingerprint(replace(info, **changes))
    assert (one.model_fingerprint != other.model_fingerprint) is differs


async def test_a_verifier_continues_only_answers_of_its_own_fingerprint(stack: Stack) -> None:
    async with Client(stack.address) as client:
        info = await client.model()
        assert (info.server_version, info.dtype) == (__version__, "float32")
        # GetModel shows the parts of the fingerprint.
        assert with_fingerprint(info).model_fingerprint == info.model_fingerprint
        asked = replace(ASKED, model_fingerprint=info.model_fingerprint)
        whole = await client.tokens(asked)
        rest = replace(asked, committed=whole[:5])
        assert whole[:5] + await client.tokens(rest) == whole
        foreign = with_fingerprint(replace(info, dtype="bfloat16")).model_fingerprint
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.tokens(replace(rest, model_fingerprint=foreign))
        assert rpc_errors.error_of(caught.value).reason is Reason.MODEL_CHANGED
