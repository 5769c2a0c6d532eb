"""Published attacks on other servers of speculative decoding, tried on this engine.

SECURITY.md lists the advisories with the test of each.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import OutriderError, Reason
from outrider.protocol.draft_messages import Proposal
from outrider.protocol.limits import MAX_TOP_LOGPROBS
from outrider.protocol.messages import FinishReason, SamplingParams, TokenRequest
from outrider.protocol.wire import drafts as wire_drafts
from outrider.v1 import drafts_pb2
from tests.hostile_messages import fuzzing
from tests.toy_grammars import Heads
from tests.verifier.fake_model import VOCAB, Client, ScriptedDrafter, finish, make_engine
from verifier_svc.engine.loop import Engine
from verifier_svc.state.sequence import Sequence

PROMPT = [1, 2, 3]
Ended = tuple[list[int], FinishReason | None]
# -1 as an id: as a C++ or Java drafter's int32, and as another implementation's 64-bit varint.
MINUS_ONE = {
    "of 32 bits": drafts_pb2.Proposal(token_ids=[3, 2**32 - 1]).SerializeToString(),
    "of 64 bits": b"\x18\x03" + b"\x18" + b"\xff" * 9 + b"\x01",
}


@pytest.mark.parametrize("sent", MINUS_ONE)
def test_minus_one_as_a_draft_token_is_refused(sent: str) -> None:
    proposal = drafts_pb2.Proposal.FromString(MINUS_ONE[sent])
    assert list(proposal.token_ids) == [3, 2**32 - 1]
    with pytest.raises(OutriderError, match="not 4294967295") as caught:
        wire_drafts.drafts_from_proto(drafts_pb2.DraftBatch(proposals=[proposal]), VOCAB)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    assert caught.value.field == "drafts.proposals[0].token_ids"


def run(
    request: TokenRequest,
    draft: Callable[[Sequence, ScriptedDrafter], object] | None,
    prepare: Callable[[Sequence], object] = lambda sequence: None,
) -> Ended:
    """Return the request's tokens and finish reason.

    Before each step, `draft` may send proposals.
    """
    engine: Engine = make_engine(always_draft=True, eos_bias=0.0)[0]
    drafter = None if draft is None else ScriptedDrafter(engine)
    client = Client()
    sequence = engine.submit(request, client)
    prepare(sequence)
    engine.drain_inbox()
    while engine.sequences:
        if draft is not None and drafter is not None and sequence.id in drafter.length:
            draft(sequence, drafter)
        engine.step()
    finish(engine)
    assert client.error is None
    assert drafter is None or drafter.error is None
    return client.tokens, client.finish_reason


PARAMETERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, VOCAB),
    top_p=st.sampled_from([0.1, 0.9, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    typical_p=st.sampled_from([0.3, 1.0]),
    repetition_penalty=st.sampled_from([0.01, 1.0, 1.3, 10.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.0, 100.0]), max_size=3
    ).map(lambda bias: tuple(bias.items())),
    min_tokens=st.integers(0, 12),
    banned_token_ids=st.sets(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
)


@fuzzing(40)
@given(PARAMETERS, st.randoms(use_true_random=False), st.none() | st.integers(0, MAX_TOP_LOGPROBS))
def test_no_parameters_end_the_engine_or_differ_with_drafts(
    sampling: SamplingParams, rng: random.Random, top_logprobs: int | None
) -> None:
    request = TokenRequest(PROMPT, 12, sampling, top_logprobs=top_logprobs)
    plain = run(request, None)

    def draft(sequence: Sequence, drafter: ScriptedDrafter) -> None:
        """Propose the tokens that will be committed, with some false tokens."""
        done = drafter.length[sequence.id] - len(PROMPT)
        true = plain[0][done : done + 3]
        tokens = [token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in true]
        if tokens:
            drafter.propose(sequence.id, tokens, anew=True)

    assert run(request, draft) == plain


@pytest.mark.parametrize("seed", range(5))
def test_stale_drafts_never_open_a_grammars_mask(seed: int) -> None:
    """Late proposals agree with the commit so far, and continue with forbidden tokens."""
    rng = random.Random(seed)
    request = TokenRequest(PROMPT, 16, SamplingParams(seed=seed))

    def constrain(sequence: Sequence) -> None:
        sequence.matcher = Heads()
        sequence.mask_width = 1

    def draft(sequence: Sequence, drafter: ScriptedDrafter) -> None:
        base = rng.randint(len(PROMPT), len(sequence.tokens))
        allowed = [rng.randrange(2) for _ in range(rng.randrange(3))]
        tokens = [*sequence.tokens[base:], *allowed, rng.randrange(2, VOCAB), 0]
        drafter.send(Proposal(sequence.id, base, tokens))

    plain = run(request, None, constrain)
    assert set(plain[0]) <= {0, 1}
    assert run(request, draft, constrain) == plain
