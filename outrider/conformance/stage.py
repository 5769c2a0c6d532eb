"""Parts that scenes share: the stage that they play on, messages, and waits for answers."""

from __future__ import annotations

from itertools import count
from typing import Any, Protocol

from outrider.conformance.ledger import TrackedSequence
from outrider.conformance.scripted_verifier import Broken, KitsVerifier, Link
from outrider.v1 import common_pb2, drafts_pb2

ANSWER_S = 5.0
NO_ANSWER = f"no answer within {ANSWER_S:.0f} s"
SKIP_S = 0.5
_IDS = count(1)
WINDOW = drafts_pb2.Window(token_count=32, depth=16)
# Tokens that repeat, so that n-gram drafters find a guess.
TEXT = [11, 12, 13, 14, 15, 16] * 4


class Stage(Protocol):
    """The part of the kit that scenes may call."""

    verifier: KitsVerifier

    async def link(self) -> Link:
        """Return the drafter's stream. Raises Broken when the drafter does not reconnect."""

    def remark(self, name: str, reason: str) -> None:
        """Record a remark about behaviour that is allowed but useless."""

    def passed(self, *rules: str) -> None:
        """Record that the drafter kept these rules in this scene."""


def opened(tokens: list[int] = TEXT, **fields: Any) -> drafts_pb2.Opened:
    """Return an Opened message for a new sequence; `fields` replace the defaults."""
    usual: dict[str, Any] = {
        "sequence_id": next(_IDS),
        "token_ids": tokens,
        "prompt_token_count": len(tokens),
        "sampling": common_pb2.SamplingParams(temperature=0),
        "distribution": drafts_pb2.DRAFT_DISTRIBUTION_ONE_HOT,
        "draft_tokens": 4,
        "window": WINDOW,
    }
    return drafts_pb2.Opened(**(usual | fields))


def verdict(
    known: TrackedSequence, new: list[int], draft_tokens: int = 4, **fields: Any
) -> drafts_pb2.Verdict:
    """Return a Verdict that commits the tokens `new`."""
    length = len(known.committed) + len(new)
    return drafts_pb2.Verdict(
        sequence_id=known.opened.sequence_id,
        committed_length=length,
        new_token_ids=new,
        draft_tokens=draft_tokens,
        **fields,
    )


async def answered(link: Link, known: TrackedSequence, rule: str) -> None:
    """Wait for an answer at the committed length, or for enough valid guesses.

    Raises Broken with `rule` if neither comes within 5 s, or if the stream ends first.
    """

    if await link.until(lambda: known.is_answered, ANSWER_S):
        return
    problem = "the stream ended" if link.ended else NO_ANSWER
    raise Broken(rule, f"{problem}, at length {len(known.committed)}", link.ended)


async def settled(stage: Stage, link: Link, known: TrackedSequence) -> None:
    """Remark if too few guesses and no Skip came within 0.5 s: a verifier would go on waiting."""
    if not await link.until(lambda: known.is_settled, SKIP_S):
        depth = len(known.valid_guess())
        text = f"{depth} guesses one after the other, where draft_tokens is {known.draft_tokens}"
        stage.remark("no-skip", f"{text}, and no Skip: a verifier may wait for more")


async def begin(link: Link, asked: drafts_pb2.Opened, rule: str) -> TrackedSequence:
    """Open a sequence and wait for the answer."""
    link.step(opened=[asked])
    known = link.ledger.sequences[asked.sequence_id]
    await answered(link, known, rule)
    return known


async def go_on(
    link: Link, known: TrackedSequence, rule: str, new: list[int], **fields: Any
) -> None:
    """Commit the tokens `new` and wait for the answer."""
    link.step(verdicts=[verdict(known, new, **fields)])
    await answered(link, known, rule)


async def still_there(link: Link, rule: str) -> None:
    """Check that the drafter answers a new sequence on the same stream; then close the sequence."""
    known = await begin(link, opened(), rule)
    link.step(closed=[drafts_pb2.Closed(sequence_id=known.opened.sequence_id)])
