"""Features of a real verifier are the target's hidden states, as `transformers` has them."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.errors import Reason
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from outrider.v1 import drafts_pb2
from tests.raw_drafter import RawDrafter
from tests.stack import TARGET, Client, Process, Stack

FEATURES = drafts_pb2.CAPABILITY_FEATURES
STATES = [3, 1]
HIDDEN = 384
WANTED = drafts_pb2.FeatureRequest(
    aux_layers=STATES, final_state=True, dtype=drafts_pb2.FEATURE_DTYPE_FLOAT32
)
PROMPT = [100 + 17 * i % 389 for i in range(50)]


async def features(drafter: RawDrafter) -> dict[int, np.ndarray]:
    """Read features until the sequence is closed; return them, keyed by position."""
    found: dict[int, np.ndarray] = {}
    while True:
        step = (await drafter.hear()).step
        for entry in step.features:
            rows = np.frombuffer(entry.rows, np.float32).reshape(-1, 3 * HIDDEN)
            found.update(enumerate(rows, entry.first_position))
        if step.closed:
            return found


def error(found: dict[int, np.ndarray], text: list[int]) -> float:
    """Return how far a text's features are from transformers' states, in standard deviations.

    There must be features of the prompt and of at least one later token, without a gap.
    """
    assert len(found) > len(PROMPT)
    assert sorted(found) == list(range(len(found)))
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    truth = torch.cat([states[k][0] for k in (*STATES, -1)], dim=1)[: len(found)]
    difference = (torch.tensor(np.stack(list(found.values()))) - truth).square().mean().sqrt()
    return float(difference / truth.std())


async def test_features_are_the_targets_hidden_states(stack: Stack) -> None:
    async with (
        Client(stack.address) as client,
        client.drafter("head", capabilities=[FEATURES], feature_request=WANTED) as drafter,
    ):
        welcome = (await drafter.hear()).welcome
        assert list(welcome.capabilities) == [FEATURES]
        assert welcome.feature_width == 3 * HIDDEN
        options = SpeculationOptions(drafter_id="head", always_draft=True)
        request = TokenRequest(
            PROMPT, 12, SamplingParams(0.0), speculation=options, ignore_eos=True
        )
        chunks, found = await asyncio.gather(client.generate(request), features(drafter))
    text = [*PROMPT, *(token for chunk in chunks for token in chunk.token_ids)]
    # The verifier and transformers both compute in float32, but round differently.
    assert error(found, text) < 0.05


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (drafts_pb2.FeatureRequest(), "hello.feature_request"),
        (drafts_pb2.FeatureRequest(aux_layers=[7]), "hello.feature_request.aux_layers"),
        (drafts_pb2.FeatureRequest(aux_layers=[1, 1]), "hello.feature_request.aux_layers"),
        (
            drafts_pb2.FeatureRequest(final_state=True, last_prompt_token_count=-1),
            "hello.feature_request.last_prompt_token_count",
        ),
    ],
)
async def test_a_wrong_request_is_refused_by_its_field(
    stack: Stack, wanted: drafts_pb2.FeatureRequest, field: str
) -> None:
    async with (
        Client(stack.address) as client,
        client.drafter("wrong", capabilities=[FEATURES], feature_request=wanted) as drafter,
    ):
        error = await drafter.error()
        assert await drafter.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.reason, error.field) == (Reason.INVALID_VALUE, field)


@pytest.mark.slow  # This test starts a verifier.
def test_a_verifier_refuses_to_keep_a_state_that_its_target_lacks() -> None:
    with Process("verifier_svc", "--target", TARGET, "--feature-states", "1,7") as process:
        assert process.popen.wait(120) == 1
        assert "feature_states must be -1 or in [0, 6], not [1, 7]" in process.output()
