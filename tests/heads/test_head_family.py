"""The family `head` offers its head's guesses, whenever and however the features come."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafter_svc.families import head_worker
from drafter_svc.families.head import HeadFamily
from drafter_svc.families.head_worker import HeadWorker
from outrider.drafter.session import DraftSession
from outrider.errors import OutriderError
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.heads.loading import load
from outrider.heads.model import Extension, HeadModel, Place, TargetWeights
from outrider.heads.reading import read
from outrider.protocol.draft_messages import (
    Closed,
    DraftBatch,
    Features,
    StepBatch,
    Verdict,
    Welcome,
    Window,
)
from outrider.protocol.messages import DraftDistribution, SamplingParams
from outrider.sampling.noise import coupled_draw, coupled_keys
from outrider.sampling.sampler import coupled_top
from tests.family_rig import opened_sequence
from tests.heads.head_files import DIALECTS, TARGET, VOCAB, write

WINDOW = Window(16, 4)
WANTED = 3


def never() -> bool:
    return False


class Site:
    """A head's family with its session, and random features for its texts."""

    def __init__(self, kind: str, folder: Path, pages: int = 40) -> None:
        self.head = read(write(folder, next(iter(DIALECTS[kind].values()))()), TARGET)
        torch.manual_seed(9)
        self.weights = TargetWeights(torch.randn(VOCAB, 16), torch.randn(VOCAB, 16) / 4)
        self._by_token = torch.randn(VOCAB, self.head.spec.feature_width)
        self._random = random.Random(9)
        self.thread = ThreadPoolExecutor(1)
        self.model = self.fresh(pages)
        self.session = self.join()

    def fresh(self, pages: int = 40) -> HeadModel:
        return load(self.head, self.weights, page_count=pages, page_size=4)

    def join(self, grammars: Any = None) -> DraftSession:
        """Return a session of another connection to the same head."""
        self.worker = HeadWorker(self.model, self.thread, grammars)
        session = DraftSession(HeadFamily(self.worker, VOCAB), lambda: 0.0)
        session.welcome(Welcome("m", VOCAB, 128, self.head.spec.feature_width))
        return session

    def text(self, length: int) -> list[int]:
        return [self._random.randrange(VOCAB) for _ in range(length)]

    def rows(self, text: list[int]) -> torch.Tensor:
        """Return features of all tokens but the last; each depends on the text up to its token."""
        rows = self._by_token[text[:-1]]
        return rows.cumsum(0) / torch.arange(1, len(text))[:, None].sqrt()

    def features(self, number: int, text: list[int], first: int, end: int) -> Features:
        return Features(number, first, self.rows(text)[first:end].numpy().tobytes())

    def guesses(self, text: list[int], first: int = 0) -> list[int]:
        """Return what the head alone guesses after a text, given the features from `first` on."""
        model = self.fresh()
        sequence = model.open(text[:1])
        model.extend([Extension(sequence, text[1:], self.rows(text)[first:], first)])
        tokens: list[int] = model.propose([sequence], WANTED).tokens[0].tolist()
        return tokens


@pytest.fixture(params=[*DIALECTS])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    made = Site(request.param, tmp_path)
    yield made
    made.thread.shutdown()


@pytest.fixture
def eagle(tmp_path: Path) -> Iterator[Site]:
    made = Site("eagle3", tmp_path)
    yield made
    made.thread.shutdown()


def opening(number: int, text: list[int], **more: object) -> StepBatch:
    return StepBatch(opened=[opened_sequence(number, text, WINDOW, WANTED, **more)])


def verdict(number: int, length: int, new: list[int]) -> Verdict:
    return Verdict(number, length, new, 0, WANTED)


async def proposed(session: DraftSession) -> dict[int, list[int]]:
    """Return the tokens of one round's proposals, keyed by sequence."""
    batch: DraftBatch = await session.round(never)
    return {proposal.sequence_id: proposal.token_ids for proposal in batch.proposals}


async def test_it_offers_what_the_head_guesses_behind_each_commit(site: Site) -> None:
    text = site.text(30)
    site.session.apply(opening(1, text[:9]))
    assert await proposed(site.session) == {}
    # A prompt's features come in parts while the target reads the prompt. The last part comes with
    # the first verdict.
    for first, end in ((0, 4), (4, 8)):
        site.session.apply(StepBatch(features=[site.features(1, text, first, end)]))
    length = 9
    for count in (1, 3, 1, 2):
        news = site.features(1, text, length - 1, length - 1 + count)
        site.session.apply(StepBatch(features=[news]))
        commit = verdict(1, length + count, text[length : length + count])
        site.session.apply(StepBatch(verdicts=[commit]))
        length += count
        assert await proposed(site.session) == {1: site.guesses(text[:length])}


async def test_after_a_gap_it_drafts_from_the_features_behind_it(site: Site) -> None:
    text = site.text(20)
    site.session.apply(opening(1, text[:9]))
    site.session.apply(StepBatch(features=[site.features(1, text, 0, 4)]))
    news = site.features(1, text, 6, 11)
    site.session.apply(StepBatch(features=[news], verdicts=[verdict(1, 12, text[9:12])]))
    assert await proposed(site.session) == {1: site.guesses(text[:12], first=6)}


async def test_a_prompts_features_that_a_slow_head_has_not_read_are_bounded(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = site.text(60)
    size = site.rows(text)[0].nbytes
    monkeypatch.setattr(head_worker, "MAX_FEATURE_BYTES", 10 * size)
    free = threading.Event()
    site.thread.submit(free.wait)
    site.session.apply(opening(1, text[:56]))
    for first in range(0, 48, 4):
        site.session.apply(StepBatch(features=[site.features(1, text, first, first + 4)]))
    worker = site.worker
    # The features of the first 12 tokens exceed the bound, so all later parts are dropped.
    assert worker._given_bytes - worker._read_bytes == 12 * size
    free.set()
    news = site.features(1, text, 48, 59)
    site.session.apply(StepBatch(features=[news], verdicts=[verdict(1, 60, text[56:])]))
    assert await proposed(site.session) == {1: site.guesses(text, first=48)}
    assert worker._given_bytes == worker._read_bytes


async def test_it_skips_a_sequence_without_features_and_drafts_for_others(site: Site) -> None:
    text = site.text(10)
    site.session.apply(opening(1, text[:9]))
    site.session.apply(opening(2, text[:9]))
    site.session.apply(StepBatch(features=[site.features(2, text, 0, 9)]))
    commits = [verdict(number, 10, text[9:]) for number in (1, 2)]
    site.session.apply(StepBatch(verdicts=commits))
    batch = await site.session.round(never)
    assert [skip.sequence_id for skip in batch.skips] == [1]
    assert [(each.sequence_id, each.token_ids) for each in batch.proposals] == [
        (2, site.guesses(text))
    ]


async def test_a_cached_prefix_needs_no_features_again(site: Site) -> None:
    text = site.text(14)
    site.session.apply(opening(1, text[:13]))
    news = site.features(1, text, 0, 13)
    site.session.apply(StepBatch(features=[news], verdicts=[verdict(1, 14, text[13:])]))
    alone = await proposed(site.session)
    site.session.apply(StepBatch(closed=[Closed(1)]))
    # The target's prefix cache had a part of the prompt. For that part no features come.
    known = 8 if site.head.spec.decoder else 0
    site.session.apply(opening(2, text[:13]))
    news = site.features(2, text, known, 13)
    site.session.apply(StepBatch(features=[news], verdicts=[verdict(2, 14, text[13:])]))
    assert await proposed(site.session) == {2: alone[1]}


async def test_another_tenants_pages_are_not_read(eagle: Site) -> None:
    text = eagle.text(14)
    news = eagle.features(1, text, 0, 13)
    eagle.session.apply(opening(1, text[:13], tenant="one"))
    eagle.session.apply(StepBatch(features=[news], verdicts=[verdict(1, 14, text[13:])]))
    await proposed(eagle.session)
    eagle.session.apply(opening(2, text[:13], tenant="two"))
    news = eagle.features(2, text, 8, 13)
    eagle.session.apply(StepBatch(features=[news], verdicts=[verdict(2, 14, text[13:])]))
    assert await proposed(eagle.session) == {2: eagle.guesses(text, first=8)}


async def test_sequences_of_several_connections_share_a_head(eagle: Site) -> None:
    other = eagle.join()
    texts = [eagle.text(10), eagle.text(12)]
    for session, text in zip((eagle.session, other), texts, strict=True):
        session.apply(opening(1, text[:-1]))
        news = eagle.features(1, text, 0, len(text) - 1)
        commit = verdict(1, len(text), text[-1:])
        session.apply(StepBatch(features=[news], verdicts=[commit]))
    assert await proposed(eagle.session) == {1: eagle.guesses(texts[0])}
    assert await proposed(other) == {1: eagle.guesses(texts[1])}


async def test_without_pages_it_skips_and_later_goes_on(tmp_path: Path) -> None:
    site = Site("eagle3", tmp_path, pages=5)
    text = site.text(16)
    for number in (1, 2):
        site.session.apply(opening(number, text[:13]))
        news = site.features(number, text, 0, 13)
        commit = verdict(number, 14, text[13:14])
        site.session.apply(StepBatch(features=[news], verdicts=[commit]))
    assert list(await proposed(site.session)) == [1]
    site.session.apply(StepBatch(closed=[Closed(1)]))
    news = site.features(2, text, 13, 15)
    site.session.apply(StepBatch(features=[news], verdicts=[verdict(2, 16, text[14:])]))
    assert await proposed(site.session) == {2: site.guesses(text, first=13)}
    site.thread.shutdown()


async def test_a_closed_sequence_frees_its_pages(eagle: Site) -> None:
    text = eagle.text(14)
    eagle.session.apply(opening(1, text[:13]))
    news = eagle.features(1, text, 0, 13)
    eagle.session.apply(StepBatch(features=[news], verdicts=[verdict(1, 14, text[13:])]))
    await proposed(eagle.session)
    assert eagle.model.pool.used_count > 0
    eagle.session.apply(StepBatch(closed=[Closed(1)]))
    eagle.thread.submit(never).result()
    assert eagle.model.pool.used_count == 0


async def test_coupled_guesses_are_drawn_with_the_verifiers_noise(eagle: Site) -> None:
    text = eagle.text(14)
    sampling = SamplingParams(0.7, seed=5)
    coupled = DraftDistribution.COUPLED
    eagle.session.apply(opening(1, text[:13], sampling=sampling, distribution=coupled))
    news = eagle.features(1, text, 0, 13)
    eagle.session.apply(StepBatch(features=[news], verdicts=[verdict(1, 14, text[13:])]))
    found = (await proposed(eagle.session))[1]
    model = eagle.fresh()
    sequence = model.open(text[:1])
    model.extend([Extension(sequence, text[1:], eagle.rows(text), 0)])
    drawn: list[int] = []

    def rank(
        places: Sequence[Place], scores: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs = (scores[0].double() / 0.7).softmax(-1).numpy()
        drawn.append(coupled_draw(probs, 5, 14 + len(places[0][1])))
        return torch.tensor([drawn[-1:]]), torch.ones(1, 1)

    model.propose([sequence], WANTED, rank=rank)
    assert found == drawn


async def test_a_failed_forward_costs_one_draft_of_a_text_and_no_later_text(
    eagle: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = eagle.text(20)
    read_rows = eagle.model.read_rows

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("planted")

    # The head fails while it reads a part of the prompt, before any draft is asked for.
    monkeypatch.setattr(eagle.model, "read_rows", fail)
    eagle.session.apply(opening(1, text[:13]))
    eagle.session.apply(StepBatch(features=[eagle.features(1, text, 0, 6)]))
    news = eagle.features(1, text, 6, 13)
    eagle.session.apply(StepBatch(features=[news], verdicts=[verdict(1, 14, text[13:14])]))
    assert await proposed(eagle.session) == {}
    monkeypatch.setattr(eagle.model, "read_rows", read_rows)
    eagle.session.apply(opening(2, text[:13]))
    news = eagle.features(2, text, 0, 13)
    eagle.session.apply(StepBatch(features=[news], verdicts=[verdict(2, 14, text[13:14])]))
    assert await proposed(eagle.session) == {2: eagle.guesses(text[:14])}


async def test_a_failed_read_of_one_text_costs_no_text_in_the_same_draft(
    eagle: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, text = eagle.text(20), eagle.text(20)
    read_rows = eagle.model.read_rows

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("planted")

    eagle.session.apply(opening(1, broken[:13]))
    eagle.session.apply(opening(2, text[:13]))
    monkeypatch.setattr(eagle.model, "read_rows", fail)
    eagle.session.apply(StepBatch(features=[eagle.features(1, broken, 0, 6)]))
    eagle.thread.submit(lambda: None).result()
    monkeypatch.setattr(eagle.model, "read_rows", read_rows)
    news = [eagle.features(1, broken, 6, 13), eagle.features(2, text, 0, 13)]
    verdicts = [verdict(1, 14, broken[13:14]), verdict(2, 14, text[13:14])]
    eagle.session.apply(StepBatch(features=news, verdicts=verdicts))
    await proposed(eagle.session)
    # The head may have lost the states of text 2 that it got so far, as after a gap. It reads the
    # states of the later tokens.
    later = [eagle.features(2, text, 13, 16)]
    eagle.session.apply(StepBatch(features=later, verdicts=[verdict(2, 17, text[14:17])]))
    assert (await proposed(eagle.session))[2] in (
        eagle.guesses(text[:17]),
        eagle.guesses(text[:17], first=13),
    )


def test_a_verifier_of_another_target_is_refused(eagle: Site) -> None:
    width = eagle.head.spec.feature_width
    family = HeadFamily(HeadWorker(eagle.model, eagle.thread), VOCAB)
    with pytest.raises(OutriderError, match="does not send the hidden states"):
        family.welcomed(Welcome("m", VOCAB, 128))
    with pytest.raises(OutriderError, match=f"reads features of {width} numbers"):
        family.welcomed(Welcome("m", VOCAB, 128, width + 1))


class Rising:
    """A grammar in which each token is 1 to 3 more than the token before, from `first` on."""

    mask_width = -(-VOCAB // 32)
    ended = False

    def __init__(self, first: int) -> None:
        self.output = [first]

    def compile(self, grammar: Grammar) -> Rising:
        return self

    def matcher(self) -> Rising:
        return self

    def allows(self, output: list[int]) -> bool:
        return all(0 < token - before < 4 for before, token in pairwise([self.output[0], *output]))

    def accept(self, token: int) -> bool:
        self.output.append(token)
        return self.allows(self.output[1:])

    def rollback(self, count: int) -> None:
        del self.output[len(self.output) - count :]

    def fill(self, mask: np.ndarray, row: int) -> None:
        for token in range(self.output[-1] + 1, min(self.output[-1] + 4, VOCAB)):
            mask.view(np.uint32)[row, token // 32] |= np.uint32(1 << token % 32)


@pytest.mark.parametrize("distribution", [DraftDistribution.ONE_HOT, DraftDistribution.COUPLED])
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "redrafter", "dflash"])
async def test_all_guesses_obey_the_requests_grammar(
    kind: str, distribution: DraftDistribution, tmp_path: Path
) -> None:
    site = Site(kind, tmp_path)
    text = site.text(12)
    grammar: Any = Rising(text[-1] // 4)
    site.session = site.join(grammar)
    text[-1] = grammar.output[0] + 2
    sampling = SamplingParams(0.0 if distribution is DraftDistribution.ONE_HOT else 0.7, seed=5)
    more = {"sampling": sampling, "distribution": distribution}
    choice = Grammar(GrammarKind.CHOICE, choices=("any",))
    site.session.apply(opening(1, text[:11], grammar=choice, prompt_length=11, **more))
    commit = replace(verdict(1, 12, text[11:]), tree_tokens=12)
    news = site.features(1, text, 0, 11)
    site.session.apply(StepBatch(features=[news], verdicts=[commit]))
    [proposal] = (await site.session.round(never)).proposals
    parents = proposal.parents or range(len(proposal.token_ids))
    paths = [[text[-1]]]
    for token, parent in zip(proposal.token_ids, parents, strict=True):
        paths.append([*paths[parent], token])
    assert len(paths) > WANTED
    assert all(grammar.allows(path) for path in paths)
    site.thread.shutdown()


class OneToken:
    """A grammar that allows only one token after `count` tokens, and any token elsewhere."""

    only = 5

    def __init__(self, count: int) -> None:
        self.count = count

    def mask(self, output: Sequence[int]) -> np.ndarray[Any, Any]:
        mask = np.full((1, -(-VOCAB // 32)), -1, np.int32)
        if len(output) == self.count:
            mask[:] = 0
            mask[0, 0] = 1 << self.only
        return mask


@pytest.mark.parametrize("allowed", range(WANTED + 1))
async def test_a_draft_ends_where_grammar_and_bans_leave_no_token(
    eagle: Site, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """A later guess would have no parent, and a confidence of 0 breaks the protocol."""
    monkeypatch.setattr(head_worker.GrammarState, "of", lambda *_: OneToken(1 + allowed))
    session, text = eagle.join(), eagle.text(12)
    banned = SamplingParams(0.0, banned_token_ids=(OneToken.only,))
    session.apply(opening(1, text[:11], prompt_length=11, sampling=banned))
    commit = replace(verdict(1, 12, text[11:]), tree_tokens=12)
    news = eagle.features(1, text, 0, 11)
    session.apply(StepBatch(features=[news], verdicts=[commit]))
    depths = [0]
    for proposal in (await session.round(never)).proposals:
        assert min(proposal.confidences, default=1.0) > 0.0
        for parent in proposal.parents or range(len(proposal.token_ids)):
            depths.append(depths[parent] + 1)
    assert max(depths) == allowed


async def test_beside_a_coupled_guess_are_those_that_the_noise_would_draw_next(eagle: Site) -> None:
    text = eagle.text(14)
    sampling = SamplingParams(0.7, seed=5)
    coupled = DraftDistribution.COUPLED
    opened = opening(1, text[:13], sampling=sampling, distribution=coupled)
    eagle.session.apply(opened)
    news = eagle.features(1, text, 0, 13)
    commit = replace(verdict(1, 14, text[13:]), tree_tokens=9)
    eagle.session.apply(StepBatch(features=[news], verdicts=[commit]))
    [proposal] = (await eagle.session.round(never)).proposals
    found = [
        token for token, at in zip(proposal.token_ids, proposal.parents, strict=True) if not at
    ]
    model = eagle.fresh()
    sequence = model.open(text[:1])
    model.extend([Extension(sequence, text[1:], eagle.rows(text), 0)])
    seen: list[torch.Tensor] = []

    def rank(
        places: Sequence[Place], scores: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.from_numpy(coupled_keys([5], [14]))
        best, shares = coupled_top((scores.double() / 0.7).softmax(-1), keys, 8)
        seen.append(best)
        return best, shares

    model.propose([sequence], 1, rank=rank)
    assert len(found) > 2
    assert found == seen[0][0, : len(found)].tolist()
