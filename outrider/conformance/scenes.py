"""What the scripted verifier plays: each scene leads a drafter to some rules, and raises Broken where one is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Protocol

from outrider.conformance.ledger import Followed
from outrider.conformance.scripted_verifier import Broken, Link, ScriptedVerifier, refused
from outrider.errors import Reason
from outrider.v1 import common_pb2, drafts_pb2, verifier_pb2

ANSWER_S = 5.0
_BACK_S = 4.0
_RETRY_S = 1.5
_QUIET_S = 0.3
_IDS = count(1)
WINDOW = drafts_pb2.Window(token_count=32, depth=16)
# Text that repeats itself, so that whoever looks for repetition has something to offer.
TEXT = [11, 12, 13, 14, 15, 16] * 4


class Stage(Protocol):
    """What a scene may use."""

    verifier: ScriptedVerifier

    async def link(self) -> Link:
        """The drafter's stream; raises Broken when it does not come back."""

    def passed(self, *rules: str) -> None:
        """These rules were kept, as far as this scene can tell."""


def opened(tokens: list[int] = TEXT, **fields: Any) -> drafts_pb2.Opened:
    """A sequence of its own; `fields` replace what is usual."""
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


def verdict(known: Followed, new: list[int], wanted: int = 4, **fields: Any) -> drafts_pb2.Verdict:
    """These tokens were committed."""
    length = len(known.committed) + len(new)
    return drafts_pb2.Verdict(
        sequence_id=known.opened.sequence_id,
        committed_length=length,
        new_token_ids=new,
        draft_tokens=wanted,
        **fields,
    )


async def answered(link: Link, known: Followed, rule: str) -> None:
    """Wait until the drafter owes nothing for the sequence; raises Broken."""

    def nothing_owed() -> bool:
        length = len(known.committed)
        return len(known.standing()) >= known.wanted or length in known.answered

    if await link.until(nothing_owed, ANSWER_S):
        return
    what = "the stream ended" if link.ended else f"no answer within {ANSWER_S:.0f} s"
    raise Broken(rule, f"{what}, at length {len(known.committed)}")


async def begin(link: Link, asked: drafts_pb2.Opened, rule: str) -> Followed:
    link.say(opened=[asked])
    known = link.ledger.sequences[asked.sequence_id]
    await answered(link, known, rule)
    return known


async def go_on(link: Link, known: Followed, rule: str, new: list[int], **fields: Any) -> None:
    link.say(verdicts=[verdict(known, new, **fields)])
    await answered(link, known, rule)


async def still_there(link: Link, rule: str) -> None:
    """The stream lives, and a new sequence is answered on it."""
    known = await begin(link, opened(), rule)
    link.say(closed=[drafts_pb2.Closed(sequence_id=known.opened.sequence_id)])


async def rounds(stage: Stage) -> None:
    link = await stage.link()
    known = await begin(link, opened(), "answers-opened")
    stage.passed("answers-opened")
    for _ in range(6):
        hit = known.standing()[:3]
        await go_on(link, known, "answers-verdicts", [*hit, 17])
        miss = (known.standing() or [20])[0] + 1
        await go_on(link, known, "answers-verdicts", [miss])
        await go_on(link, known, "answers-verdicts", TEXT[:5])
    stage.passed("answers-verdicts", "valid-base", "valid-tokens", "valid-parents")
    stage.passed("valid-distributions")
    link.say(closed=[drafts_pb2.Closed(sequence_id=known.opened.sequence_id)])
    await asyncio.sleep(0.6)
    stage.passed("knows-its-sequences")


async def silence(stage: Stage) -> None:
    link = await stage.link()
    known = await begin(link, opened(), "answers-opened")
    quiet = False
    deadline = time.monotonic() + ANSWER_S
    while not quiet and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        quiet = time.monotonic() - link.heard_at > 1.0
    if not quiet:
        raise Broken("falls-silent", f"still speaking {ANSWER_S:.0f} s after it was asked")
    await go_on(link, known, "answers-verdicts", [21])
    stage.passed("falls-silent")


async def many(stage: Stage) -> None:
    rule, link = "many-at-once", await stage.link()
    asked = [opened([30 + i, *TEXT]) for i in range(24)]
    link.say(opened=asked)
    known = [link.ledger.sequences[one.sequence_id] for one in asked]
    for one in known:
        await answered(link, one, rule)
    short = opened()
    follow = drafts_pb2.Verdict(
        sequence_id=short.sequence_id,
        committed_length=len(TEXT) + 1,
        new_token_ids=[9],
        draft_tokens=4,
    )
    link.say(
        opened=[short],
        verdicts=[follow, *(verdict(one, [40, 41]) for one in known)],
        closed=[drafts_pb2.Closed(sequence_id=short.sequence_id)],
    )
    for one in known:
        await answered(link, one, rule)
    link.say(closed=[drafts_pb2.Closed(sequence_id=one.sequence_id) for one in asked])
    await still_there(link, rule)
    stage.passed(rule)


async def repeats(stage: Stage) -> None:
    rule, link = "repeated-verdicts", await stage.link()
    known = await begin(link, opened(), "answers-opened")
    faultless = link.ledger.fault_count == 0
    said = verdict(known, [31, 32])
    link.say(verdicts=[said])
    link.say(verdicts=[said])
    await answered(link, known, rule)
    overlapping = drafts_pb2.Verdict(
        sequence_id=said.sequence_id,
        committed_length=said.committed_length + 1,
        new_token_ids=[32, 33],
        draft_tokens=4,
    )
    link.say(verdicts=[overlapping])
    await answered(link, known, rule)
    # Two steps that came in one message.
    first = verdict(known, [34])
    second = drafts_pb2.Verdict(
        sequence_id=said.sequence_id,
        committed_length=first.committed_length + 1,
        new_token_ids=[35],
        draft_tokens=4,
    )
    link.say(verdicts=[first, second])
    await answered(link, known, rule)
    if faultless and link.ledger.fault_count:
        raise Broken(rule, "what follows stands behind a length that was never committed")
    stage.passed(rule)


async def unknown(stage: Stage) -> None:
    """An enum's value, a grammar's kind and a message's kind that only a later version knows."""
    odd: Any = 99
    link = await stage.link()
    known = await begin(link, opened(distribution=odd), "unknown-values")
    link.say(closed=[drafts_pb2.Closed(sequence_id=known.opened.sequence_id, reason=odd)])
    await still_there(link, "unknown-values")
    stage.passed("unknown-values")
    link = await stage.link()
    await begin(link, opened(grammar=common_pb2.Grammar()), "unknown-grammars")
    stage.passed("unknown-grammars")
    link = await stage.link()
    link.send(verifier_pb2.StreamDraftsResponse())
    # Field 2047 of a length that is 2: a kind of message to come.
    link.send(verifier_pb2.StreamDraftsResponse.FromString(b"\xfa\x7f\x02\x08\x01"))
    await still_there(link, "unknown-messages")
    stage.passed("unknown-messages")


async def sizes(stage: Stage) -> None:
    rule, link = "large-numbers", await stage.link()
    await begin(link, opened([7]), rule)
    await begin(link, opened(sequence_id=2**53 - 1), rule)
    long = [1 + i % 997 for i in range(stage.verifier.model.context_length - 200)]
    known = await begin(link, opened(long), rule)
    await go_on(link, known, rule, [5, 6])
    stage.passed(rule)


async def windows(stage: Stage) -> None:
    rule, link = "windows", await stage.link()
    known = await begin(link, opened(), "answers-opened")
    one = drafts_pb2.Window(token_count=1, depth=1)
    await go_on(link, known, rule, TEXT[:1], wanted=1, window=one)
    link.say(verdicts=[verdict(known, TEXT[1:2], wanted=0)])
    await asyncio.sleep(0.3)
    await go_on(link, known, rule, TEXT[2:3], window=WINDOW)
    stage.passed(rule)


async def predictions(stage: Stage) -> None:
    rule, link = "predictions", await stage.link()
    expected = [*range(200, 216)]
    known = await begin(link, opened([7, 8, 9], prediction_token_ids=expected), rule)
    for new in ([], expected[:2], [expected[2]]):
        if new:
            await go_on(link, known, rule, new)
        guess = known.standing()
        told = len(known.committed) - len(known.opened.token_ids)
        if not guess or guess[0] not in expected:
            return
        if guess[0] != expected[told]:
            text = f"guesses {guess[0]} where the prediction has {expected[told]}"
            raise Broken(rule, text)
    stage.passed(rule)


async def sampled(stage: Stage) -> None:
    link = await stage.link()
    sampling = common_pb2.SamplingParams(temperature=1.0, seed=2**64 - 1)
    for kind in link.hello.distributions:
        if kind in (drafts_pb2.DRAFT_DISTRIBUTION_SPARSE, drafts_pb2.DRAFT_DISTRIBUTION_COUPLED):
            asked = opened(sampling=sampling, distribution=kind)
            known = await begin(link, asked, "valid-distributions")
            await go_on(link, known, "valid-distributions", [21, 22])


async def draining(stage: Stage) -> None:
    link = await stage.link()
    known = await begin(link, opened(), "answers-opened")
    goodbye = drafts_pb2.Draining(reason="the conformance kit restarts")
    link.send(verifier_pb2.StreamDraftsResponse(draining=goodbye))
    await go_on(link, known, "serves-while-draining", [23])
    stage.passed("serves-while-draining")
    # A drafter in Python that writes while the stream ends sees INTERNAL in place of this status:
    # github.com/grpc/grpc/issues/36066.
    await asyncio.sleep(_QUIET_S)
    link.end(refused(Reason.DRAINING, _RETRY_S))
    ended_at = time.monotonic()
    await stage.link()
    waited = stage.verifier.attempts[-1] - ended_at
    if waited < 0.9 * _RETRY_S:
        text = f"back after {waited:.2f} s, where RetryInfo says {_RETRY_S} s"
        raise Broken("honours-retry-info", text)
    stage.passed("honours-retry-info")


async def restarts(stage: Stage) -> None:
    link = await stage.link()
    await begin(link, opened(), "answers-opened")
    link.end(None)
    link = await stage.link()
    await asyncio.sleep(0.3)
    stage.passed("begins-anew")
    link.end(refused(Reason.INTERNAL))
    stage.verifier.refusal = refused(Reason.DRAFTER_ID_TAKEN)
    attempts = len(stage.verifier.attempts)
    deadline = time.monotonic() + _BACK_S
    while len(stage.verifier.attempts) == attempts:
        if time.monotonic() > deadline:
            raise Broken("comes-back", f"not back within {_BACK_S:.0f} s of INTERNAL")
        await asyncio.sleep(0.02)
    stage.verifier.refusal = None
    link = await stage.link()
    await still_there(link, "comes-back")
    stage.passed("comes-back")


Scene = Callable[[Stage], Awaitable[None]]
SCENES: tuple[Scene, ...] = (
    rounds,
    silence,
    many,
    repeats,
    unknown,
    sizes,
    windows,
    predictions,
    sampled,
    draining,
    restarts,
)
