"""The scripted verifier's scenes.

Each scene tests some rules and raises Broken when a rule is broken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from outrider.conformance.guess_scenes import repeating, trees
from outrider.conformance.scripted_verifier import (
    Broken,
    refused,
    refused_for_a_later_reason,
)
from outrider.conformance.stage import (
    ANSWER_S,
    TEXT,
    WINDOW,
    Stage,
    answered,
    begin,
    go_on,
    opened,
    still_there,
    verdict,
)
from outrider.errors import Reason, Retry
from outrider.v1 import common_pb2, drafts_pb2, verifier_pb2

_BACK_S = 4.0
_RETRY_S = 1.5
_QUIET_S = 0.3
_IDLE_S = 2.5


async def rounds(stage: Stage) -> None:
    """Commit the drafter's own guesses, then tokens that it did not guess, and so on."""
    link = await stage.link()
    known = await begin(link, opened(), "answers-opened")
    stage.passed("answers-opened")
    for _ in range(6):
        hit = known.valid_guess()[:3]
        await go_on(link, known, "answers-verdicts", [*hit, 17])
        miss = (known.valid_guess() or [20])[0] + 1
        await go_on(link, known, "answers-verdicts", [miss])
        await go_on(link, known, "answers-verdicts", TEXT[:5])
    stage.passed("answers-verdicts", "valid-base", "valid-tokens", "valid-parents")
    stage.passed("valid-distributions", "valid-confidences", "valid-durations")
    link.step(closed=[drafts_pb2.Closed(sequence_id=known.opened.sequence_id)])
    await asyncio.sleep(0.6)
    stage.passed("knows-its-sequences")


async def silence(stage: Stage) -> None:
    """After Opened, send nothing until the drafter is silent. Also find too frequent pings."""
    link = await stage.link()
    known = await begin(link, opened(), "answers-opened")
    quiet = False
    deadline = time.monotonic() + ANSWER_S
    while not quiet and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        quiet = time.monotonic() - link.received_at > 1.0
    if not quiet:
        raise Broken("falls-silent", f"still sends messages {ANSWER_S:.0f} s after Opened")
    stage.passed("falls-silent")
    if await link.until(lambda: link.ended, _IDLE_S):
        raise Broken(
            "keeps-the-stream", "the stream ended in silence; pings that come too often cause this"
        )
    stage.passed("keeps-the-stream")
    await go_on(link, known, "answers-verdicts", [21])


async def many(stage: Stage) -> None:
    """Open, continue and close several sequences in one step."""
    rule = "many-at-once"
    link = await stage.link()
    asked = [opened([30 + i, *TEXT]) for i in range(24)]
    link.step(opened=asked)
    known = [link.ledger.sequences[each.sequence_id] for each in asked]
    for sequence in known:
        await answered(link, sequence, rule)
    short = opened()
    follow = drafts_pb2.Verdict(
        sequence_id=short.sequence_id,
        committed_length=len(TEXT) + 1,
        new_token_ids=[9],
        draft_tokens=4,
    )
    link.step(
        opened=[short],
        verdicts=[follow, *(verdict(sequence, [40, 41]) for sequence in known)],
        closed=[drafts_pb2.Closed(sequence_id=short.sequence_id)],
    )
    for sequence in known:
        await answered(link, sequence, rule)
    link.step(closed=[drafts_pb2.Closed(sequence_id=each.sequence_id) for each in asked])
    await still_there(link, rule)
    stage.passed(rule)


async def repeats(stage: Stage) -> None:
    """Send verdicts that repeat, that overlap, and that come two at a time."""
    rule = "repeated-verdicts"
    link = await stage.link()
    known = await begin(link, opened(), "answers-opened")
    faultless = link.ledger.fault_count == 0
    repeated = verdict(known, [31, 32])
    link.step(verdicts=[repeated])
    link.step(verdicts=[repeated])
    await answered(link, known, rule)
    overlapping = drafts_pb2.Verdict(
        sequence_id=repeated.sequence_id,
        committed_length=repeated.committed_length + 1,
        new_token_ids=[32, 33],
        draft_tokens=4,
    )
    link.step(verdicts=[overlapping])
    await answered(link, known, rule)
    # Two verdicts of one sequence in one message.
    first = verdict(known, [34])
    second = drafts_pb2.Verdict(
        sequence_id=repeated.sequence_id,
        committed_length=first.committed_length + 1,
        new_token_ids=[35],
        draft_tokens=4,
    )
    link.step(verdicts=[first, second])
    await answered(link, known, rule)
    if faultless and link.ledger.fault_count:
        raise Broken(rule, "the answers name a length that was never committed")
    stage.passed(rule)


async def unknown(stage: Stage) -> None:
    """Send an enum value, a grammar kind and a message kind that only a later version knows."""
    odd: Any = 99
    link = await stage.link()
    known = await begin(link, opened(distribution=odd), "unknown-values")
    link.step(closed=[drafts_pb2.Closed(sequence_id=known.opened.sequence_id, reason=odd)])
    await still_there(link, "unknown-values")
    stage.passed("unknown-values")
    link = await stage.link()
    await begin(link, opened(grammar=common_pb2.Grammar()), "unknown-grammars")
    stage.passed("unknown-grammars")
    link = await stage.link()
    link.send(verifier_pb2.StreamDraftsResponse())
    # Field 2047, two bytes long: a kind of message that only a later version knows.
    link.send(verifier_pb2.StreamDraftsResponse.FromString(b"\xfa\x7f\x02\x08\x01"))
    await still_there(link, "unknown-messages")
    stage.passed("unknown-messages")


async def sizes(stage: Stage) -> None:
    """Open a sequence of one token, a sequence with the largest id, and one with a long prompt."""
    rule = "large-numbers"
    link = await stage.link()
    await begin(link, opened([7]), rule)
    await begin(link, opened(sequence_id=2**53 - 1), rule)
    long = [1 + i % 997 for i in range(stage.verifier.model.context_length - 200)]
    known = await begin(link, opened(long), rule)
    await go_on(link, known, rule, [5, 6])
    stage.passed(rule)


async def windows(stage: Stage) -> None:
    """Shrink the window to one token, ask for no draft tokens, and widen the window again."""
    rule = "windows"
    link = await stage.link()
    known = await begin(link, opened(), "answers-opened")
    one = drafts_pb2.Window(token_count=1, depth=1)
    await go_on(link, known, rule, TEXT[:1], draft_tokens=1, window=one)
    link.step(verdicts=[verdict(known, TEXT[1:2], draft_tokens=0)])
    await asyncio.sleep(0.3)
    await go_on(link, known, rule, TEXT[2:3], window=WINDOW)
    stage.passed(rule)


async def predictions(stage: Stage) -> None:
    """Send a prediction, and check which place in it the guesses come from."""
    rule = "predictions"
    link = await stage.link()
    expected = [*range(200, 216)]
    known = await begin(link, opened([7, 8, 9], prediction_token_ids=expected), rule)
    for new in ([], expected[:2], [expected[2]]):
        if new:
            await go_on(link, known, rule, new)
        guess = known.valid_guess()
        place = len(known.committed) - len(known.opened.token_ids)
        if not guess or guess[0] not in expected:
            return
        if guess[0] != expected[place]:
            text = f"guesses {guess[0]} where the prediction has {expected[place]}"
            raise Broken(rule, text)
    stage.passed(rule)


async def features(stage: Stage) -> None:
    """Send features with a gap; then send each token's features before the token's verdict."""
    rule = "features"
    link = await stage.link()
    if not link.feature_width:
        return
    known = await begin(link, opened(), rule)
    number = known.opened.sequence_id
    length = len(known.committed)
    after_a_gap = link.features(number, length + 2, length + 4)
    link.step(verdicts=[verdict(known, TEXT[:5])], features=[after_a_gap])
    await answered(link, known, rule)
    for at in range(length + 4, length + 7):
        link.step(features=[link.features(number, at, at + 1)])
    link.step(verdicts=[verdict(known, TEXT[5:8])], features=[])
    await answered(link, known, rule)
    await go_on(link, known, rule, TEXT[8:9])
    link.step(closed=[drafts_pb2.Closed(sequence_id=number)])
    await still_there(link, rule)
    stage.passed(rule)


async def sampled(stage: Stage) -> None:
    """Ask for each kind of sampled proposal that the drafter offers."""
    link = await stage.link()
    sampling = common_pb2.SamplingParams(temperature=1.0, seed=2**64 - 1)
    for kind in link.hello.distributions:
        if kind in (drafts_pb2.DRAFT_DISTRIBUTION_SPARSE, drafts_pb2.DRAFT_DISTRIBUTION_COUPLED):
            asked = opened(sampling=sampling, distribution=kind)
            known = await begin(link, asked, "valid-distributions")
            await go_on(link, known, "valid-distributions", [21, 22])


async def draining(stage: Stage) -> None:
    """Announce the verifier's end, continue for a while, and end the stream with RetryInfo."""
    link = await stage.link()
    known = await begin(link, opened(), "answers-opened")
    goodbye = drafts_pb2.Draining(reason="the conformance kit restarts")
    link.send(verifier_pb2.StreamDraftsResponse(draining=goodbye))
    await go_on(link, known, "serves-while-draining", [23])
    stage.passed("serves-while-draining")
    # Let the drafter finish its writes: a Python drafter that writes while the stream ends gets
    # INTERNAL instead of this status (github.com/grpc/grpc/issues/36066).
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
    """End streams without a status, with an unknown reason and with INTERNAL.

    Then refuse streams with DRAFTER_ID_TAKEN.
    """
    link = await stage.link()
    await begin(link, opened(), "answers-opened")
    link.end(None)
    link = await stage.link()
    await asyncio.sleep(0.3)
    stage.passed("begins-anew")
    link.end(refused_for_a_later_reason(Retry.BACKOFF))
    link = await stage.link()
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
    features,
    trees,
    repeating,
    sampled,
    draining,
    restarts,
)
