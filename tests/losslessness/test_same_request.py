"""SmolLM2 in bfloat16 on a CPU writes the same text in whatever way the engine computes it.

`python -m pytest -m slow -s tests/losslessness/test_same_request.py` prints a row for each way.
OUTRIDER_TEST_CHATS sets the number of chats; docs/losslessness.md says what is promised.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from drafter_svc.families.ngram import NgramFamily
from drafter_svc.pools.memory import NgramOptions
from outrider.drafter.session import DraftSession
from outrider.errors import OutriderError
from outrider.gguf import pretrained
from outrider.lm.cpu.decoder import CpuDecoder
from outrider.lm.pages import PagePool
from outrider.lm.runner import ModelRunner
from outrider.protocol.draft_messages import DraftBatch, Hello, Proposal, StepBatch
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenChunk, TokenRequest
from outrider.smollm2 import gguf_file
from outrider.tokenizer import load_tokenizer
from tests.losslessness.traffic import seed_of
from tests.stack import prompt_texts
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT
from verifier_svc.verification.batch import DraftVerifier

CHATS = int(os.environ.get("OUTRIDER_TEST_CHATS", "8"))
NEW_TOKENS = 32
# The largest number of chats that share one pool. The pages of 200 chats would take 6 GB.
AT_MOST = 40
PAGES = 75 * min(CHATS, AT_MOST)
CONTENT = 600
Texts = list[list[int]]


def model_file() -> str | None:
    try:
        return gguf_file()
    except OutriderError:
        return None


MODEL = model_file()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(60 * max(CHATS, 10)),
    pytest.mark.skipif(
        MODEL is None, reason="SmolLM2's package is missing; `make test-slow` installs it"
    ),
]


@pytest.fixture(scope="module", params=["C decoder", "own forward"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    assert MODEL is not None
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "own forward":
            patch.setattr(CpuDecoder, "of", lambda *arguments: None)
        loaded = ModelRunner.load(pretrained(MODEL), dtype="bfloat16", page_count=PAGES)
    assert (loaded.decoder is not None) == (request.param == "C decoder")
    return loaded


@pytest.fixture(scope="module")
def chats() -> Texts:
    """Return prompts of up to some 200 tokens, as SmolLM2's chat template writes them."""
    assert MODEL is not None
    tokenizer = load_tokenizer(pretrained(MODEL))
    contents = prompt_texts() * (CHATS // 40 + 1)
    asked = [f"{i}. Go on:\n{text[:CONTENT]}" for i, text in enumerate(contents[:CHATS])]
    wrapped = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in asked]
    return [each.ids for each in tokenizer.encode_batch(wrapped)]


class Drafter:
    """A drafter in this process.

    The drafter sees the verifier's messages and drafts at each tick.
    """

    name = "drafter"
    connected = True

    def join(self, engine: Engine) -> None:
        """Connect to an engine."""
        self._engine = engine
        self._handle = engine.drafting.join(Hello(self.name, self.name, "f", 12), self._on_message)

    def tick(self) -> None:
        """Send the drafter's new drafts."""
        self._engine.drafting.on_drafts(self._handle, self._draft())

    def _on_message(self, message: StepBatch | OutriderError) -> None:
        assert isinstance(message, StepBatch), message
        self._read(message)

    def _read(self, message: StepBatch) -> None:
        raise NotImplementedError

    def _draft(self) -> DraftBatch:
        raise NotImplementedError


class Ngrams(Drafter):
    """The family `ngram`."""

    name = "ngram"

    def __init__(self, loop: asyncio.Runner) -> None:
        self._session = DraftSession(NgramFamily(NgramOptions(), 1000))
        self._loop = loop

    def _read(self, message: StepBatch) -> None:
        self._session.apply(message)

    def _draft(self) -> DraftBatch:
        return self._loop.run(self._session.round(lambda: False))


class Knowing(Drafter):
    """Drafts six tokens of the known texts. The fourth token is wrong in every other draft.

    With `trees` it also proposes a wrong sibling of each token.
    """

    name = "knowing"

    def __init__(self, texts: Texts, *, trees: bool) -> None:
        self._texts = texts
        self._trees = trees
        self._committed: dict[int, list[int]] = {}

    def _read(self, message: StepBatch) -> None:
        for opened in message.opened:
            self._committed[opened.sequence_id] = list(opened.token_ids)
        for verdict in message.verdicts:
            self._committed[verdict.sequence_id] += verdict.new_token_ids
        for closed in message.closed:
            self._committed.pop(closed.sequence_id, None)

    def _draft(self) -> DraftBatch:
        batch = DraftBatch()
        for number, committed in self._committed.items():
            length = len(committed)
            known = next((text for text in self._texts if text[:length] == committed), [])
            ahead = known[length : length + 6]
            if length % 2 and len(ahead) > 3:
                ahead[3] = 17
            parents = list(range(len(ahead)))
            if ahead and self._trees:
                parents *= 2
                ahead += [18] * len(ahead)
            if ahead:
                batch.proposals.append(Proposal(number, length, ahead, parents))
        return batch


@dataclass
class Way:
    """Settings with which an engine computes the texts."""

    runner: ModelRunner
    at_once: int = 1
    chunk: int = 512
    pages: int = PAGES
    drafters: Sequence[Drafter] = ()
    trees: bool = False
    aside_at: int | None = None
    """The number of tokens after which each answer's reader stops for some steps."""
    accepted: int = field(default=0, init=False)
    pause_count: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        def deliver(deliveries: list[Delivery]) -> None:
            for sink, argument in deliveries:
                sink(argument)

        policy = DraftTokensPolicy("fixed", 6)
        config = EngineConfig(policy, self.chunk, draft_trees=self.trees)
        self.engine = Engine(
            self.runner,
            PagePool(self.pages, self.runner.page_size),
            deliver,
            VerifierMetrics("smollm2"),
            config,
            DraftVerifier(),
            draft_policy=EVERY_DRAFT,
        )
        for drafter in self.drafters:
            drafter.join(self.engine)

    def texts(self, chats: Texts, committed: Texts | None = None) -> Texts:
        """Answer all chats, alternately greedily and with a seed."""
        found: Texts = [[] for _ in chats]
        for first in range(0, len(chats), self.at_once):
            for i in range(first, min(first + self.at_once, len(chats))):
                self._submit(i, chats[i], committed[i] if committed else [], found[i])
            while self.engine.sequences:
                self.engine.drain_inbox()
                for drafter in self.drafters:
                    drafter.tick()
                self.engine.step()
                self.engine.outbox.send_to_clients()
                self._pause()
        self.engine.pool.check_integrity()
        return [
            [*before, *text]
            for before, text in zip(committed or [[]] * len(chats), found, strict=True)
        ]

    def _submit(self, i: int, prompt: list[int], committed: list[int], into: list[int]) -> None:
        def collect(chunk: TokenChunk | OutriderError) -> None:
            assert isinstance(chunk, TokenChunk), chunk
            into.extend(chunk.token_ids)
            if chunk.stats is not None:
                self.accepted += chunk.stats.accepted_token_count

        sampling = SamplingParams(0.8, seed=seed_of(i)) if i % 2 else SamplingParams(0.0)
        request = TokenRequest(
            prompt,
            NEW_TOKENS,
            sampling,
            ignore_eos=True,
            speculation=SpeculationOptions(enabled=bool(self.drafters)),
            committed=committed,
        )
        self.engine.submit(request, collect)

    def _pause(self) -> None:
        if self.aside_at is None:
            return
        for sequence in [*self.engine.scheduler.unread.values()]:
            self.engine.resume(sequence)
        for sequence in [*self.engine.scheduler.running.values()]:
            written = len(sequence.tokens) - len(sequence.request.prompt)
            if sequence.unread_at is None and written == self.aside_at:
                self.engine.pause(sequence)
                self.pause_count += 1


def test_a_chat_has_the_same_text_in_every_way(
    runner: ModelRunner, chats: Texts, request: pytest.FixtureRequest
) -> None:
    differing: Counter[str] = Counter()
    started = time.perf_counter()
    for first in range(0, CHATS, AT_MOST):
        for name, count in compared(runner, chats[first : first + AT_MOST]):
            differing[name] += count
            asked = min(first + AT_MOST, CHATS)
            seconds = time.perf_counter() - started
            which = f"{request.node.callspec.id}: {name}"
            print(f"\n{which}: {differing[name]} of {asked} differ ({seconds:.0f} s)")
    assert not any(differing.values()), differing


def compared(runner: ModelRunner, chats: Texts) -> Iterator[tuple[str, int]]:
    """Yield each `Way`'s name, and how many chats get another text than if answered one by one."""
    fresh = Way(runner)
    expected = fresh.texts(chats)
    whole = [prompt + text for prompt, text in zip(chats, expected, strict=True)]
    half = [text[: NEW_TOKENS // 2] for text in expected]

    def differ(found: Texts) -> int:
        return sum(a != b for a, b in zip(found, expected, strict=True))

    yield "fresh, again cached", differ(fresh.texts(chats))
    assert fresh.engine.scheduler.cached_token_count > 0
    for chunk in (16, 48):
        yield f"chunks of {chunk}", differ(Way(runner, chunk=chunk).texts(chats))
    yield "batch of 8", differ(Way(runner, 8).texts(chats))
    with asyncio.Runner() as loop:
        yield "n-grams", differ(Way(runner, 8, drafters=[Ngrams(loop)]).texts(chats))
    for trees in (False, True):
        way = Way(runner, 2, drafters=[Knowing(whole, trees=trees)], trees=trees)
        yield "trees of 12" if trees else "drafts of 6", differ(way.texts(chats))
        assert way.accepted > len(chats) * NEW_TOKENS / 3
    small = Way(runner, 8, pages=40)
    yield "preempted", differ(small.texts(chats))
    assert small.engine.scheduler.preemption_count > 0
    unread = Way(runner, 8, aside_at=11)
    yield "paused", differ(unread.texts(chats))
    assert unread.pause_count >= len(chats)
    yield "failed over", differ(Way(runner, 8, chunk=48).texts(chats, half))
