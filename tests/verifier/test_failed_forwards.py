"""A forward that fails, or whose logits are not finite, ends its requests with an error."""

import pytest
import torch

from outrider.errors import Reason
from outrider.protocol.messages import SamplingParams, TokenRequest
from tests.verifier.fake_model import GREEDY, Client, make_engine


def test_a_failed_forward_ends_its_batch_and_the_engine_goes_on() -> None:
    engine, model = make_engine()
    unlucky = Client()
    engine.submit(TokenRequest([1, 2], 5, GREEDY), unlucky)

    def broken(slices: object) -> None:
        raise RuntimeError("out of memory")

    model.broken = broken
    engine.step()
    assert unlucky.error is not None
    assert unlucky.error.reason is Reason.INTERNAL
    model.broken = lambda slices: None
    lucky = Client()
    engine.submit(TokenRequest([1, 2], 5, GREEDY), lucky)
    while engine.sequences:
        engine.step()
    assert engine.pool.used_count == 0
    assert lucky.tokens == model.greedy([1, 2], 5)


def test_a_failed_device_ends_the_engine() -> None:
    """No later forward of this process could succeed."""
    engine, model = make_engine()
    engine.submit(TokenRequest([1, 2], 5, GREEDY), Client())

    def broken(slices: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    model.broken = broken
    with pytest.raises(torch.AcceleratorError):
        engine.step()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_end_their_request_alone(temperature: float) -> None:
    engine, model = make_engine(eos_bias=-99)
    model.table[5] = torch.nan
    unlucky = Client()
    lucky = Client()
    engine.submit(TokenRequest([5, 2], 5, SamplingParams(temperature)), unlucky)
    engine.submit(TokenRequest([1, 2], 3, SamplingParams(0.0)), lucky)
    while engine.sequences:
        engine.step()
    assert unlucky.tokens == []
    assert unlucky.error is not None
    assert unlucky.error.reason is Reason.LOGITS_NOT_FINITE
    assert "not finite" in unlucky.error.message
    assert lucky.tokens == model.greedy([1, 2], 3)
    assert engine.pool.used_count == 0


def test_non_finite_logits_of_a_scored_prompt_end_its_request() -> None:
    engine, model = make_engine(eos_bias=-99)
    model.table[5] = torch.nan
    client = Client()
    engine.submit(TokenRequest([5, 2, 3, 1], 5, SamplingParams(0.0), prompt_logprobs=0), client)
    while engine.sequences:
        engine.step()
    assert client.error is not None
    assert client.error.reason is Reason.LOGITS_NOT_FINITE
