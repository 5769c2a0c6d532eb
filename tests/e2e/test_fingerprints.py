"""Real verifiers refuse to continue what one of another dtype or other settings has begun."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest
from stack import Client, Stack, running  # lies beside this file
from test_same_seed import PLAIN, request

from outrider import __version__
from outrider.errors import OutriderError, Reason
from outrider.process import rpc
from outrider.protocol.messages import SamplingParams

GREEDY = SamplingParams(0.0)


@pytest.mark.parametrize("flag", [("--dtype", "bfloat16"), ("--sampled-rule", "token-wise")])
async def test_only_a_verifier_of_the_same_fingerprint_continues_an_answer(
    flag: tuple[str, str],
) -> None:
    first, second = Stack(), Stack(*flag)
    with running(first), running(second):
        async with Client(first.address) as one, Client(second.address) as other:
            began, differs = await one.model(), await other.model()
            assert began.server_version == __version__
            assert began.weights_fingerprint == differs.weights_fingerprint
            assert began.fingerprint != differs.fingerprint
            asked = replace(request(0, PLAIN, GREEDY), model_fingerprint=began.fingerprint)
            whole = await one.tokens(asked)
            rest = replace(asked, committed=whole[:5])
            assert whole[:5] + await one.tokens(rest) == whole
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await other.tokens(rest)
            error: OutriderError = rpc.error_of(caught.value)
            assert error.reason is Reason.MODEL_CHANGED
