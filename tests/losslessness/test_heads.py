"""Heads of every kind change no text, whatever happens to their messages and features.

The tests run the real engine, a real target with hidden states, and the real family `head`.
Messages pass through protobuf. The target and the heads have random weights and a vocabulary of 40
tokens. Requests allow only its first five tokens, so that texts can be enumerated.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_svc.families.head import HeadFamily
from drafter_svc.families.head_worker import HeadWorker
from outrider.drafter.session import DraftSession
from outrider.errors import OutriderError
from outrider.heads.projection import ServedProjection, projection_name
from outrider.heads.reading import read
from outrider.heads.spec import Head
from outrider.lm.runner import ModelRunner
from outrider.lm.streams import SharedRows
from outrider.protocol.draft_messages import Hello, Proposal, StepBatch, Welcome
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import SamplingParams
from outrider.protocol.wire import drafts as wire
from tests.heads.head_files import DIALECTS, TARGET, write
from tests.heads.head_files import VOCAB as ALL
from tests.heads.random_target import BANNED, load_for_target, target
from tests.losslessness.chi_square import compare
from tests.losslessness.guesser import Guesser
from tests.losslessness.small import VOCAB, Probs, Text
from tests.losslessness.traffic import Traffic, seed_of
from verifier_svc.engine.loop import Engine
from verifier_svc.state.drafter import Drafter

PAGE = 4
PAGES = 4096
CONCURRENT = 5
COUNT = 9
"""The number of requests in a comparison."""
LENGTH = 18
PROMPTS: list[Text] = [
    (*range(9, 9 + number % 3 * PAGE), *[number * at % ALL for at in range(1, 4 + number % 5)])
    for number in range(1, COUNT + 1)
]
"""Prompts of several lengths; two of three begin alike for a page or two."""
SETTINGS = {
    "greedy": SamplingParams(0.0, banned_token_ids=BANNED),
    "sampled": SamplingParams(frequency_penalty=0.2, banned_token_ids=BANNED),
}


@cache
def target_probs(text: Text) -> Probs:
    """Return the distribution of the allowed tokens after a text, [VOCAB]."""
    with torch.inference_mode():
        logits = target()(torch.tensor([text])).logits[0, -1, :VOCAB]
    probs: Probs = logits.double().softmax(-1).numpy()
    return probs


class HeadDrafter(Guesser):
    """Drafts with the real family `head`. Other guessers draft from a table.

    Each `dropped`-th message with features loses its features, as when a drafter reads slowly.
    While the drafter `hangs`, it reads and sends nothing. With `is_local` it is in the verifier's
    process: no message passes through protobuf, and features are tensors.
    """

    def __init__(
        self,
        worker: HeadWorker,
        loop: asyncio.Runner,
        *,
        dropped: int = 0,
        late: int = 0,
        is_local: bool = False,
    ) -> None:
        super().__init__("head", target_probs, HeadFamily.distributions, late=late)
        self.dropped = dropped
        self._is_local = is_local
        self._worker = worker
        self._loop = loop
        self._lives: list[Drafter] = []
        self.hangs = False
        self.marks: list[int] = []
        """The number of right guesses before each event of a test."""
        self.drafts: dict[Text, list[Proposal]] = {}
        """All proposals after each committed text."""
        self.empty_count = 0
        """The number of texts after which the drafter could propose nothing."""
        self.feature_bytes = 0

    def join(self, engine: Engine) -> None:
        self._engine = engine
        self._incoming.clear()
        self._outbox.clear()
        self.connected = True
        self._family = HeadFamily(self._worker, ALL)
        hello = Hello(
            self.name,
            "head",
            "f",
            12,
            distributions=self._offers,
            feature_request=self._family.feature_request,
        )
        self._handle = engine.drafting.join(hello, self._on_message, is_local=self._is_local)
        self._lives.append(self._handle)
        self._session = DraftSession(self._family, lambda: 0.0)
        handle = self._handle
        welcome = Welcome("m", ALL, 128, handle.feature_width, handle.projects_features)
        self._session.welcome(welcome)

    def leave(self) -> None:
        self.marks.append(self.accepted_count)
        super().leave()
        self._loop.run(self._family.aclose())

    def _on_message(self, message: StepBatch | OutriderError) -> None:
        assert isinstance(message, StepBatch), message
        if self._is_local:
            assert all(isinstance(each.rows, SharedRows) for each in message.features)
            self._incoming.append((self._due(), message))
            return
        step = wire.step_to_proto(message)
        self.feature_bytes += sum([len(each.rows) for each in step.features])
        if step.features and self.dropped and self._rng.integers(self.dropped) == 0:
            del step.features[:]
            self.marks.append(self.accepted_count)
        self._incoming.append((self._due(), wire.step_from_proto(step, ALL)))

    def tick(self) -> None:
        self._tick += 1
        if self.hangs:
            return
        while self._incoming and self._incoming[0][0] <= self._tick:
            self._session.apply(self._incoming.popleft()[1])
        batch = self._loop.run(self._session.round(lambda: False))
        proposed = {proposal.sequence_id for proposal in batch.proposals}
        self.empty_count += len({skip.sequence_id for skip in batch.skips} - proposed)
        for proposal in batch.proposals:
            text = tuple(self._session.sequences[proposal.sequence_id].tokens)
            self.drafts.setdefault(text, []).append(proposal)
        self._outbox.append((self._due(), batch))
        while self._outbox and self._outbox[0][0] <= self._tick:
            sent = self._outbox.popleft()[1]
            if not self._is_local:
                sent = wire.drafts_from_proto(wire.drafts_to_proto(sent), ALL)
            self._engine.drafting.on_drafts(self._handle, sent)

    @property
    def accepted_count(self) -> int:
        """The number of verified guesses that were right."""
        return sum([life.accepted_count for life in self._lives])


@dataclass
class Site:
    """A head of one kind, with the target for which it drafts."""

    head: Head
    runner: ModelRunner
    loop: asyncio.Runner
    thread: ThreadPoolExecutor

    def drafter(self, **behaviour: int) -> HeadDrafter:
        """Return a drafter with an empty cache."""
        model = load_for_target(self.head, PAGES, PAGE)
        return HeadDrafter(HeadWorker(model, self.thread), self.loop, **behaviour)

    def traffic(self, **settings: Any) -> Traffic:
        return traffic(self.runner, **settings)


def traffic(runner: ModelRunner, **settings: Any) -> Traffic:
    """Return traffic: requests through an engine with the target."""
    made: dict[str, Any] = {
        "probs": target_probs,
        "prompts": tuple(PROMPTS),
        "policy": DraftTokensPolicy("fixed", 3),
        "length": LENGTH,
        "concurrent": CONCURRENT,
        "page_count": PAGES,
        "page_size": PAGE,
        "trees": True,
    }
    return Traffic(runner=runner, **made | settings)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(copy.deepcopy(target()), page_size=PAGE, page_count=PAGES)


@pytest.fixture(scope="module", params=[*DIALECTS])
def site(
    request: pytest.FixtureRequest, runner: ModelRunner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    kind: str = request.param
    folder: Path = tmp_path_factory.mktemp(kind)
    head = read(write(folder, next(iter(DIALECTS[kind].values()))()), TARGET)
    with ThreadPoolExecutor(1) as thread, asyncio.Runner() as loop:
        yield Site(head, runner, loop, thread)


@dataclass
class Case:
    """Faults that a test plays on a head and on its messages."""

    behaviour: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    events: Callable[[Traffic, HeadDrafter, int], object] = lambda traffic, drafter, tick: None
    is_calm: bool = False
    happened: Callable[[Traffic], bool] = lambda traffic: True


def die_and_join(traffic: Traffic, drafter: HeadDrafter, tick: int) -> None:
    """Let the drafter die, and another drafter join a little later."""
    if tick % 8 == 5:
        drafter.leave()
    elif tick % 8 == 7:
        drafter.join(traffic.engine)


def hang(traffic: Traffic, drafter: HeadDrafter, tick: int) -> None:
    """Let the drafter stop for a few steps, then read and answer the messages that it missed."""
    if tick % 8 == 4:
        drafter.marks.append(drafter.accepted_count)
    drafter.hangs = tick % 8 > 3


def hang_or_die(traffic: Traffic, drafter: HeadDrafter, tick: int) -> None:
    """Alternate `die_and_join` and `hang`."""
    event = die_and_join if tick % 16 < 8 else hang
    event(traffic, drafter, tick)


SMALL: dict[str, Any] = {"page_count": 24, "max_batch_tokens": 24}
"""A small cache, and prompts in chunks."""
CASES = {
    "calm": Case(is_calm=True),
    "late": Case({"late": 1}, is_calm=True),
    "in the verifier's process": Case({"is_local": True}, is_calm=True),
    "in the verifier's process, hung": Case({"is_local": True}, events=hang),
    "killed": Case(events=die_and_join),
    "hung": Case(events=hang),
    "dropped features": Case({"dropped": 3}),
    "preempted, in chunks, on cached pages": Case(
        settings=SMALL,
        is_calm=True,
        happened=lambda traffic: (
            traffic.engine.scheduler.preemption_count > 0
            and traffic.engine.scheduler.cached_token_count > 0
        ),
    ),
    "everything": Case({"late": 1, "dropped": 12}, SMALL, hang_or_die),
}
QUICK = (("calm", "greedy"), ("everything", "sampled"))


@pytest.fixture(scope="module")
def plain(runner: ModelRunner) -> Callable[[str], list[list[int]]]:
    """Return the texts without drafts, keyed by setting."""

    @cache
    def texts(setting: str) -> list[list[int]]:
        calm = traffic(runner, sampling=SETTINGS[setting], seed=seed_of)
        found: list[list[int]] = calm.run(COUNT).tolist()
        assert len({tuple(text) for text in found}) > COUNT / 2
        return found

    return texts


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow)
        for pair in itertools.product(CASES, SETTINGS)
    ],
)
def test_a_killed_hung_or_late_head_changes_no_text(
    site: Site, plain: Callable[[str], list[list[int]]], name: str, setting: str
) -> None:
    case = CASES[name]
    traffic = site.traffic(**case.settings, sampling=SETTINGS[setting], seed=seed_of)
    drafter = site.drafter(**case.behaviour)
    traffic.events = lambda tick: case.events(traffic, drafter, tick)
    assert traffic.run(COUNT, drafter).tolist() == plain(setting)
    assert case.happened(traffic)
    assert drafter.accepted_count > 0
    if not case.is_calm:
        # After an event, some of the head's guesses were right.
        assert drafter.accepted_count > drafter.marks[0]


def test_drafting_after_a_prefix_hit_equals_drafting_without_one(site: Site) -> None:
    """The target computes no states of cached tokens, so the second request's draft lacks these."""
    prompt = (*range(9, 30), 3, 1)
    traffic = site.traffic(
        prompts=(prompt,), sampling=SETTINGS["greedy"], concurrent=1, trees=False
    )
    drafter = site.drafter()
    first, second = traffic.run(2, drafter).tolist()
    assert first == second
    assert traffic.engine.scheduler.cached_token_count >= 20
    assert len(drafter.drafts) > 3
    for without, behind in drafter.drafts.values():
        assert without.token_ids == behind.token_ids
        assert without.confidences == pytest.approx(behind.confidences, abs=1e-5)


def test_a_verifier_that_projects_sends_fewer_bytes_for_the_same_drafts(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not projection_name(site.head):
        pytest.skip("this kind reads a single state, so there is no projection")
    drafters = []
    for projects in (False, True):
        served = ServedProjection(site.head, site.runner.device)
        names = {projection_name(site.head): served} if projects else {}
        monkeypatch.setattr(site.runner, "projections", names)
        drafters.append(site.drafter())
        site.traffic(sampling=SETTINGS["greedy"], concurrent=1).run(COUNT // 3, drafters[-1])
    raw, projected = drafters
    assert raw.drafts.keys() == projected.drafts.keys()
    for text, found in raw.drafts.items():
        tokens = [
            [proposal.token_ids for proposal in each] for each in (found, projected.drafts[text])
        ]
        assert tokens[0] == tokens[1]
    ratio = site.head.spec.feature_width / served.projected_width
    assert raw.feature_bytes == ratio * projected.feature_bytes > 0


def test_lost_features_cost_the_drafts_of_their_step_alone(site: Site) -> None:
    """The features after a gap are enough for drafting."""
    traffic = site.traffic(prompts=(PROMPTS[0],), sampling=SETTINGS["greedy"], length=40)
    drafter = site.drafter()
    empty: list[int] = []

    def lose(tick: int) -> None:
        drafter.dropped = 1 if tick == 5 else 0
        empty.append(drafter.empty_count)

    traffic.events = lose
    traffic.run(1, drafter)
    assert len(drafter.marks) == 1
    # The count rises twice: after the prompt, where the head cannot guess yet, and after the loss.
    assert empty[:12] == [0, *[1] * 6, *[2] * 5]


@pytest.mark.slow
def test_texts_behind_a_head_follow_the_target(site: Site) -> None:
    traffic = site.traffic(
        prompts=((2, 1, 3), (1, 2, 3, 4, 0, 1, 2, 2, 4, 1, 0)),
        sampling=SamplingParams(banned_token_ids=BANNED),
        concurrent=128,
        length=6,
    )
    drafter = site.drafter(late=1, dropped=6)
    texts = traffic.run(6_000, drafter)
    assert drafter.accepted_count > 1_000
    compare(traffic.observed(texts), traffic.expected(len(texts))).must_agree(sees=0.08)
