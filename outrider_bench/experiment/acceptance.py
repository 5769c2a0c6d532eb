"""Counts how often drafters guess the target's greedy tokens on a fixed load. Reads no clock."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from drafter_svc.families.head_worker import Offer
from drafter_svc.pools.memory import MemoryPool, NgramOptions
from outrider_bench.experiment.calibration import load_of
from outrider_bench.experiment.recording import WRONG, Recorder
from outrider_bench.simulator.recorded import RecordedRequest
from outrider_bench.simulator.world import NO_GUESS, RIGHT

_POOL_ENTRIES = 1_000_000


def acceptances(
    target: Path, draft: Path, dtype: str, head: Path | None = None
) -> dict[str, float]:
    """The share of the calibration load's tokens that each family guesses right.

    A missing guess counts as wrong. N-grams are looked up in the request's own text alone, so a
    pool that knows earlier requests guesses more.
    """
    heads = {} if head is None else {"head": head}
    recorder = Recorder(target, dtype, {"model": draft}, heads)
    requests = recorder.record(load_of(target, 1))
    found = {
        "model": share_of_right([each.guesses["model"][: each.output_tokens] for each in requests]),
        "ngram": share_of_right([_lookups(each) for each in requests]),
    }
    if heads:
        offers = recorder.offers
        found["head"] = share_of_right(
            [
                drafts(
                    offers[tuple(each.prompt_ids)]["head"], each.output_ids[: each.output_tokens]
                )
                for each in requests
            ]
        )
    return found


def share_of_right(guesses: Sequence[str]) -> float:
    """The acceptance that gives the same block efficiency with drafts of any length.

    With drafts of any depth a round ends at each token that is not guessed. So tokens / rounds is
    1 / (1 − share), which is the block efficiency at this acceptance.
    """
    total = sum([len(each) for each in guesses])
    return sum([each.count(RIGHT) for each in guesses]) / max(total, 1)


def drafts(offers: Sequence[Offer], output: Sequence[int]) -> str:
    """Say for each token of `output` whether a head's chains guess it, as `lookups` does.

    A new chain begins behind a wrong guess, and behind the end of the chain before.
    """
    found = ""
    while len(found) < len(output):
        chain = offers[len(found)].tokens
        pairs = zip(chain, output[len(found) :], strict=False)
        run = takewhile(lambda pair: pair[0] == pair[1], pairs)
        found += RIGHT * len([*run]) + WRONG
    return found[: len(output)]


def _lookups(request: RecordedRequest) -> str:
    return lookups(request.prompt_ids, request.output_ids[: request.output_tokens])


def lookups(prompt: Sequence[int], output: Sequence[int]) -> str:
    """Say for each token of `output` whether n-grams of the text before it guess it.

    Returns a character a token: right, wrong or no guess. A run of guesses goes on until one is
    wrong or the run ends, as in a draft.
    """
    options = NgramOptions()
    pool = MemoryPool(options, _POOL_ENTRIES)
    text = list(prompt)
    found = ""
    pool.index(text, 0)
    run: list[int] = []
    for token in output:
        if not run:
            ending = text[-options.max_matching_ngram_size :]
            run = pool.continuation(ending, options.max_draft_len)
        if not run:
            found += NO_GUESS
        elif run[0] == token:
            found += RIGHT
            run = run[1:]
        else:
            found += WRONG
            run = []
        text.append(token)
        pool.index(text, len(text) - 1)
    return found
