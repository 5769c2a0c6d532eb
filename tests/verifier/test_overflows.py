"""A model that overflows at a token harms only the text with this token.

The model is real, because real attention multiplies a masked token's NaN by the weight 0: this
gives NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.errors import Reason
from outrider.lm.pages import PagePool
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import Proposal, SparseDistribution
from outrider.protocol.messages import DraftDistribution, SamplingParams, TokenRequest
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT

BAD = 7
PAGES, PAGE = 8, 16
# torch's attention over gathered pages and, with head size 64, the C library's attention.
every_attention = pytest.mark.parametrize(
    ("dtype", "head_size"), [(torch.float16, 8), (torch.float32, 64)]
)


def make(dtype: torch.dtype, head_size: int, *, trust: bool = False) -> Engine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        head_dim=head_size,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(5)
        # The model never chooses this token: it comes only from a draft or a prompt.
        model.get_output_embeddings().weight[BAD] = 0.0
    runner = ModelRunner(model.to(dtype), page_count=PAGES, page_size=PAGE)
    # The runner's trial at start would refuse this model.
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = torch.inf

    def deliver(deliveries: list[Delivery]) -> None:
        for sink, argument in deliveries:
            sink(argument)

    return Engine(
        runner,
        PagePool(PAGES, PAGE),
        deliver,
        VerifierMetrics("small"),
        EngineConfig(),
        draft_policy=EVERY_DRAFT,
        sampled_drafts=trust,
    )


def finish(engine: Engine) -> None:
    for _ in range(100):
        if not engine.sequences:
            break
        engine.step()
    engine.drain_inbox()
    engine._go_idle()


def written(engine: Engine, prompt: list[int], tenant: str = "") -> Client:
    client = Client()
    request = TokenRequest(prompt, 6, GREEDY, ignore_eos=True, tenant=tenant)
    engine.submit(request, client)
    finish(engine)
    return client


@every_attention
def test_a_guess_ends_no_sequence(dtype: torch.dtype, head_size: int) -> None:
    plain = written(make(dtype, head_size), [3, 4, 5])
    assert len(plain.tokens) == 6
    engine = make(dtype, head_size)
    drafter = ScriptedDrafter(engine)
    drafter.prove()
    client = Client()
    sequence = engine.submit(TokenRequest([3, 4, 5], 6, GREEDY, ignore_eos=True), client)
    engine.drain_inbox()
    drafter.propose(sequence.id, [BAD], anew=True)
    finish(engine)
    assert client.error is None
    assert client.tokens == plain.tokens
    assert engine.pool.used_count == 0


@every_attention
def test_a_sampled_guess_is_not_dropped_for_its_value(dtype: torch.dtype, head_size: int) -> None:
    """Drawing again only after a bad draw would bias the text."""
    engine = make(dtype, head_size, trust=True)
    drafter = ScriptedDrafter(engine, distributions=frozenset(DraftDistribution))
    drafter.prove()
    client = Client()
    request = TokenRequest([3, 4, 5], 6, SamplingParams(1.0), ignore_eos=True)
    sequence = engine.submit(request, client)
    engine.drain_inbox()
    sure = SparseDistribution(np.array([BAD]), np.array([1.0]))
    drafter.send(Proposal(sequence.id, 3, [BAD], [], [sure]))
    finish(engine)
    assert client.error is not None
    assert client.error.reason is Reason.LOGITS_NOT_FINITE


@every_attention
def test_pages_of_an_ended_sequence_harm_no_later_one(dtype: torch.dtype, head_size: int) -> None:
    fresh = written(make(dtype, head_size), [3, 4, 5])
    engine = make(dtype, head_size)
    failed = written(engine, [BAD] * 100, "a")
    assert failed.error is not None
    assert failed.error.reason is Reason.LOGITS_NOT_FINITE
    clients = [Client(), Client()]
    for client, prompt in zip(clients, ([3, 4, 5], [3, 4, 6, 8]), strict=True):
        engine.submit(TokenRequest(prompt, 6, GREEDY, ignore_eos=True, tenant="b"), client)
    finish(engine)
    assert [client.error for client in clients] == [None, None]
    assert clients[0].tokens == fresh.tokens


def test_after_an_overflow_no_drafter_drafts_for_the_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drafter that joins later could propose the token again, and cost a forward each time."""
    engine = make(torch.float32, 64)
    forward, counts = engine.model.forward, []

    def counted(slices: Sequence[SequenceSlice]) -> torch.Tensor:
        counts.append(len(slices))
        return forward(slices)

    monkeypatch.setattr(engine.model, "forward", counted)
    drafters = [ScriptedDrafter(engine)]
    client = Client()
    sequence = engine.submit(TokenRequest([3, 4, 5], 6, GREEDY, ignore_eos=True), client)
    while engine.sequences:
        engine.drain_inbox()
        for drafter in drafters:
            drafter.prove()
            if sequence.id in drafter.length:
                drafter.propose(sequence.id, [BAD], anew=True)
        engine.step()
        drafters.append(ScriptedDrafter(engine, f"drafter {len(drafters)}"))
    engine._go_idle()
    assert len(client.tokens) == 6
    assert len(counts) == 1 + 6, "the step with the draft is repeated once"
    assert all(drafter.length == {} for drafter in drafters[1:])
