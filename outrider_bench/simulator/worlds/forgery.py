"""Makes hostile drafters' messages: some that no delay explains, and floods of allowed messages."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from outrider.v1 import drafts_pb2
from outrider_bench.simulator.worlds.target import VOCAB

Forge = Callable[[Random, drafts_pb2.Proposal], None]


def _id_out_of_range(draw: Random, proposal: drafts_pb2.Proposal) -> None:
    proposal.token_ids[draw.randrange(len(proposal.token_ids))] = draw.choice([VOCAB, 2**32 - 1])


def _false_sum(draw: Random, proposal: drafts_pb2.Proposal) -> None:
    for token in proposal.token_ids:
        proposal.distributions.add(token_ids=[token], probabilities=[draw.choice([0.5, 2.0])])


def _not_a_number(draw: Random, proposal: drafts_pb2.Proposal) -> None:
    proposal.confidences.extend([draw.choice([float("nan"), 0.0, -1.0, 1.5])])
    proposal.confidences.extend([0.5] * (len(proposal.token_ids) - 1))


def _nothing(draw: Random, proposal: drafts_pb2.Proposal) -> None:
    proposal.ClearField("token_ids")


def _orphan(draw: Random, proposal: drafts_pb2.Proposal) -> None:
    proposal.parents.extend([1, *range(1, len(proposal.token_ids))])


def _future(draw: Random, proposal: drafts_pb2.Proposal) -> None:
    proposal.base_length += draw.choice([1, 2, 100, 2**31 - 200])


def _past(draw: Random, proposal: drafts_pb2.Proposal) -> None:
    proposal.base_length = 0


def _unknown_sequence(draw: Random, proposal: drafts_pb2.Proposal) -> None:
    proposal.sequence_id += draw.choice([100, 2**40])


def _certain(draw: Random, proposal: drafts_pb2.Proposal) -> None:
    """Claim that each token was drawn with probability 1.

    The claim is allowed, but counts only where the verifier trusts sampled drafts.
    """
    for token in proposal.token_ids:
        proposal.distributions.add(token_ids=[token], probabilities=[1.0])


REFUSED: tuple[Forge, ...] = (_id_out_of_range, _false_sum, _not_a_number, _nothing, _orphan)
"""Forgeries that are refused before the engine sees them."""
FORGERIES: tuple[Forge, ...] = (*REFUSED, _future, _past, _unknown_sequence, _certain)


def guess(draw: Random, sequence_id: int, base_length: int, most: int) -> drafts_pb2.Proposal:
    """Return a proposal of random tokens, a chain or a tree."""
    count = draw.randint(1, most)
    proposal = drafts_pb2.Proposal(
        sequence_id=sequence_id,
        base_length=base_length,
        token_ids=draw.choices(range(VOCAB), k=count),
    )
    if draw.random() < 0.5:
        proposal.parents.extend([draw.randint(0, place) for place in range(count)])
    return proposal
