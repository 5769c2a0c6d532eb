"""The real draft model, which samples from a few of its likeliest tokens, does not bias texts."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafter_svc.families import forwards
from drafter_svc.families.draft_model import DraftModel
from drafter_svc.families.model import ModelFamily
from outrider.drafter.session import DraftSession
from outrider.errors import OutriderError
from outrider.lm.runner import ModelRunner
from outrider.protocol.draft_messages import Hello, StepBatch
from outrider.protocol.messages import DraftDistribution
from tests.losslessness.chi_square import LEAST_P, Comparison, compare
from tests.losslessness.guesser import Guesser
from tests.losslessness.small import Probs, Text
from tests.losslessness.traffic import Traffic
from verifier_svc.engine.loop import Engine

VOCAB = 5
ENTRIES = 3
CONCURRENT = 256
DRAWS = 5_400


@cache
def model(noise: float) -> LlamaForCausalLM:
    """Return a tiny model with peaked distributions; `noise` changes its weights."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
            parameter.mul_(1 + noise * torch.randn(parameter.shape))
    return made


@cache
def target_probs(text: Text) -> Probs:
    with torch.inference_mode():
        probs: Probs = model(0.0)(torch.tensor([text])).logits[0, -1].double().softmax(-1).numpy()
    return probs


class ModelDrafter(Guesser):
    """The real draft model, in place of a guesser's table."""

    def __init__(self, family: ModelFamily, loop: asyncio.Runner) -> None:
        super().__init__("model", target_probs, family.distributions)
        self._session = DraftSession(family)
        self._loop = loop
        self.sampled = 0

    def join(self, engine: Engine) -> None:
        self._engine = engine
        self.connected = True
        hello = Hello("model", "model", "f", 12, distributions=self._offers)
        self._handle = engine.drafting.join(hello, self._on_message)

    def _on_message(self, message: StepBatch | OutriderError) -> None:
        assert isinstance(message, StepBatch), message
        assert all(opened.distribution is DraftDistribution.SPARSE for opened in message.opened)
        self._session.apply(message)

    def tick(self) -> None:
        batch = self._loop.run(self._session.round(lambda: False))
        for proposal in batch.proposals:
            self.sampled += sum(given is not None for given in proposal.distributions)
        self._engine.drafting.on_drafts(self._handle, batch)


@pytest.fixture
def drafter() -> Iterator[ModelDrafter]:
    with ThreadPoolExecutor(1) as thread, asyncio.Runner() as loop:
        runner = ModelRunner(copy.deepcopy(model(0.15)), page_size=4, page_count=16 * CONCURRENT)
        draft = DraftModel(runner, thread, max_batch_tokens=8 * CONCURRENT, max_entries=ENTRIES)
        yield ModelDrafter(ModelFamily(draft, VOCAB), loop)


def compared(drafter: ModelDrafter) -> Comparison:
    traffic = Traffic(target_probs, prompts=((2, 1, 3),), concurrent=CONCURRENT)
    texts = traffic.run(DRAWS, drafter)
    assert drafter.sampled > 2 * DRAWS
    return compare(traffic.observed(texts), traffic.expected(DRAWS))


@pytest.mark.slow  # half a minute; tests/drafter/test_draft_sampling.py checks each draw
def test_texts_follow_the_target_behind_the_real_draft_model(drafter: ModelDrafter) -> None:
    compared(drafter).must_agree(sees=0.066)


@pytest.mark.slow  # half a minute; it shows that the test above sees such a bias
def test_a_draft_model_that_claims_a_false_distribution_is_caught(
    drafter: ModelDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = forwards.inverse_cdf
    monkeypatch.setattr(
        forwards, "inverse_cdf", lambda weights, numbers: honest(weights**1.3, numbers)
    )
    assert compared(drafter).p < LEAST_P
