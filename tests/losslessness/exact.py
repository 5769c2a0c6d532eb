"""A tiny random model, the exact law of its next three tokens, and drafters of all sorts, all driven through the real engine."""

from __future__ import annotations

import copy
import gc
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from outrider.depth_policy import DepthPolicy
from outrider.lm.pages import PagePool
from outrider.lm.runner import ModelRunner
from outrider.messages import (
    AcceptanceRule,
    DraftBatch,
    Hello,
    Proposal,
    Rule,
    SamplingParams,
    SparseDistribution,
    SpeculationOptions,
    StepBatch,
    TokenChunk,
    TokenRequest,
)
from outrider.sampling import coupled_exponentials, coupled_keys
from verifier_svc.engine import Engine, Limits
from verifier_svc.judging import Judge
from verifier_svc.metrics import Metrics
from verifier_svc.outgoing import Delivery

VOCAB = 16
LENGTH = 3
PROMPT = [3, 5, 7, 5]
END = 9
CONCURRENT = 512
MOST = 5
"""Draft tokens of a step."""

Law = npt.NDArray[np.float64]
Drafting = Callable[[tuple[int, ...]], Law]
"""The distribution that a drafter draws from behind some generated tokens."""


@cache
def tiny_model() -> LlamaForCausalLM:
    """Random weights, large enough that its opinions are strong."""
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
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12.0) if parameter.dim() > 1 else None
        model.lm_head.weight.mul_(2.0)
    return model


@cache
def exact_laws(sampling: SamplingParams) -> dict[tuple[int, ...], Law]:
    """Behind every text of up to two tokens, the law of the next one, by transformers' own processors."""
    laws: dict[tuple[int, ...], Law] = {}
    for length in range(LENGTH):
        texts = list(itertools.product(range(VOCAB), repeat=length))
        ids = torch.tensor([[*PROMPT, *text] for text in texts])
        with torch.inference_mode():
            logits = tiny_model()(ids).logits[:, -1].float()
        scores = processors(sampling)(ids, logits)
        for text, row in zip(texts, scores, strict=True):
            laws[text] = row.double().softmax(-1).numpy()
    return laws


class _OutputPenalties:
    """OpenAI's presence and frequency penalties, which transformers lacks."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.stack([torch.bincount(row[len(PROMPT) :], minlength=VOCAB) for row in input_ids])
        return scores - self._presence * (counts > 0) - self._frequency * counts


def processors(s: SamplingParams) -> LogitsProcessorList:
    """transformers' processors for the settings, in the order in which it puts them."""
    found = LogitsProcessorList()
    if s.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[token], value] for token, value in s.logit_bias]))
    if s.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.presence_penalty or s.frequency_penalty:
        found.append(_OutputPenalties(s.presence_penalty, s.frequency_penalty))
    if s.banned_token_ids:
        found.append(SuppressTokensLogitsProcessor(list(s.banned_token_ids)))
    if s.min_tokens:
        found.append(MinNewTokensLengthLogitsProcessor(len(PROMPT), s.min_tokens, [END]))
    if s.temperature != 1:
        found.append(TemperatureLogitsWarper(s.temperature))
    if s.top_k:
        found.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1:
        found.append(TopPLogitsWarper(s.top_p))
    if s.min_p:
        found.append(MinPLogitsWarper(s.min_p))
    if s.typical_p < 1:
        found.append(TypicalLogitsWarper(s.typical_p))
    return found


def equal_to_target(sampling: SamplingParams) -> Drafting:
    laws = exact_laws(sampling)
    return lambda text: laws.get(text, np.full(VOCAB, 1 / VOCAB))


def reversed_target(sampling: SamplingParams) -> Drafting:
    laws = exact_laws(sampling)
    return lambda text: laws[text][::-1] if text in laws else np.full(VOCAB, 1 / VOCAB)


def on_an_unlikely_token(sampling: SamplingParams) -> Drafting:
    """Nearly all mass where the target has the least, none at all if it has a token like that."""
    laws = exact_laws(sampling)

    def law(text: tuple[int, ...]) -> Law:
        drafted = np.full(VOCAB, 0.01 / (VOCAB - 1))
        drafted[laws[text].argmin() if text in laws else 0] = 0.99
        return drafted

    return law


def flat(sampling: SamplingParams) -> Drafting:
    """All tokens alike, so that what the target likes is often accepted and often not."""
    return lambda text: np.full(VOCAB, 1 / VOCAB)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is drawn from behind some text, summed up to 1, and what is said of it."""

    law: Law
    cumulative: Law
    claimed: SparseDistribution

    @classmethod
    def of(cls, law: Law, claimed: Law) -> _Known:
        ids = np.flatnonzero(claimed > 0)
        cumulative = law.cumsum()
        return cls(law, cumulative / cumulative[-1], SparseDistribution(ids, claimed[ids]))


class LawDrafter:
    """Drafts 0 to 5 tokens a step, however many chance says; each drawn from its law as the verifier asked.

    `claims` is the distribution it says it drew from, if that is another one; `drops` ends a draft before a token. What it says
    arrives up to `late` steps later, in order. With `branches` another run, drawn likewise, is beside each token.
    """

    def __init__(
        self,
        engine: Engine,
        law: Drafting,
        offers: frozenset[Rule],
        rng: np.random.Generator,
        *,
        claims: Drafting | None = None,
        sends_distributions: bool = False,
        drops: Callable[[float], bool] = lambda probability: False,
        late: int = 0,
        branches: bool = False,
    ) -> None:
        self.make_engine, self._rng, self._drops = engine, rng, drops
        self._sends_distributions = sends_distributions
        self._known = cache(lambda text: _Known.of(law(text), (claims or law)(text)))
        self._texts: dict[int, tuple[Rule, int, list[int]]] = {}
        self._handle = engine.drafting.join(Hello("laws", "laws", "f", 8, distributions=offers), self._told)
        self._batch = DraftBatch()
        self._late = late
        self._branches = branches
        self._under_way: deque[tuple[int, DraftBatch]] = deque()
        self._step = 0

    def _told(self, step: object) -> None:
        assert isinstance(step, StepBatch), step
        asked = []
        for opened in step.opened:
            self._texts[opened.sequence_id] = opened.rule, opened.sampling.seed or 0, []
            asked.append((opened.sequence_id, opened.epoch))
        for verdict in step.verdicts:
            self._texts[verdict.sequence_id][2].extend(verdict.new_token_ids)
            # In the same epoch what is below the root still stands, and is left as it is.
            if verdict.root_node == 0:
                asked.append((verdict.sequence_id, verdict.epoch))
        noise = self._noise([sequence_id for sequence_id, _ in asked])
        for sequence_id, epoch in asked:
            self._propose(sequence_id, epoch, noise.get(sequence_id))
        for closed in step.closed:
            del self._texts[closed.sequence_id]

    def _noise(self, sequence_ids: list[int]) -> dict[int, Law]:
        """The coupled noise of the next `MOST` positions of those that draw with it, [MOST, VOCAB] each."""
        coupled = [number for number in sequence_ids if self._texts[number][0] is Rule.COUPLED]
        seeds, positions = [], []
        for number in coupled:
            _, seed, text = self._texts[number]
            seeds += [seed] * MOST
            positions += range(len(PROMPT) + len(text), len(PROMPT) + len(text) + MOST)
        if not coupled:
            return {}
        noise = coupled_exponentials(torch.from_numpy(coupled_keys(seeds, positions)), VOCAB).numpy()
        return dict(zip(coupled, noise.reshape(-1, MOST, VOCAB), strict=True))

    def _propose(self, sequence_id: int, epoch: int, noise: Law | None) -> None:
        rule, _, text = self._texts[sequence_id]
        tokens: list[int] = []
        distributions = []
        for i in range(int(self._rng.integers(0, MOST + 1))):
            known = self._known((*text, *tokens))
            token = self._draw(rule, known) if noise is None else int((known.law / noise[i]).argmax())
            if self._drops(float(known.law[token])):
                break
            tokens.append(token)
            distributions.append(known.claimed)
        if tokens:
            sends = rule is Rule.SPARSE or self._sends_distributions
            self._batch.proposals.append(Proposal(sequence_id, epoch, 0, 1, tokens, distributions if sends else []))
            if self._branches:
                self._propose_branches(sequence_id, epoch, tokens)

    def _propose_branches(self, sequence_id: int, epoch: int, main: list[int]) -> None:
        """Sampled, as deep as the main run."""
        _, _, text = self._texts[sequence_id]
        last = len(main)
        for at, avoided in enumerate(main):
            tokens: list[int] = []
            distributions = []
            while at + len(tokens) < len(main):
                known = self._known((*text, *main[:at], *tokens))
                if not tokens:
                    law = known.law.copy()
                    law[avoided] = 0.0
                    known = _Known.of(law / law.sum(), law / law.sum())
                tokens.append(int(known.cumulative.searchsorted(self._rng.random(), "right")))
                distributions.append(known.claimed)
            self._batch.proposals.append(Proposal(sequence_id, epoch, at, last + 1, tokens, distributions))
            last += len(tokens)

    def _draw(self, rule: Rule, known: _Known) -> int:
        if rule is Rule.SPARSE or self._sends_distributions:
            return int(known.cumulative.searchsorted(self._rng.random(), "right"))
        return int(known.law.argmax())

    def send(self) -> None:
        """Say what has gathered, and deliver what is due."""
        self._step += 1
        if self._batch.proposals:
            self._under_way.append((self._step + int(self._rng.integers(0, self._late + 1)), self._batch))
            self._batch = DraftBatch()
        while self._under_way and self._under_way[0][0] <= self._step:
            self.make_engine.drafting.take(self._handle, self._under_way.popleft()[1])


def generate(
    sampling: SamplingParams,
    law: Drafting | None,
    draws: int,
    *,
    offers: frozenset[Rule] = frozenset({Rule.ONE_HOT}),
    sampled_rule: AcceptanceRule = AcceptanceRule.TOKEN_WISE,
    trust: bool = False,
    seed: int = 0,
    seeded: bool = False,
    speculation: SpeculationOptions | None = None,
    **drafter: Any,
) -> npt.NDArray[np.int64]:
    """The first three tokens of `draws` requests, [draws, 3], many at a time through one engine."""
    rng = np.random.default_rng(seed)
    engine = make_engine(sampled_rule, trust)
    laws = LawDrafter(engine, law, offers, rng, **drafter) if law is not None else None
    done: list[list[int]] = []
    # The engine would draw a seed from the system; here the test has to come out the same each time.
    own = np.random.default_rng(seed + 1)
    with mock.patch("verifier_svc.engine.secrets.randbits", side_effect=lambda bits: int(own.integers(2**63))):
        # A third of the time would go into looking for cycles among what all these requests hold.
        thresholds = gc.get_threshold()
        gc.set_threshold(200_000, 50, 100)
        try:
            _run(engine, laws, sampling, draws, seeded, speculation or SpeculationOptions(depth=5), done)
        finally:
            gc.set_threshold(*thresholds)
    return np.array([[*tokens, *[END] * (LENGTH - len(tokens))] for tokens in done])


def _run(
    engine: Engine,
    laws: LawDrafter | None,
    sampling: SamplingParams,
    draws: int,
    seeded: bool,
    speculation: SpeculationOptions,
    done: list[list[int]],
) -> None:
    numbers: Iterator[int] = iter(range(draws))

    def start() -> None:
        number = next(numbers, None)
        if number is None:
            return
        tokens: list[int] = []
        request = TokenRequest(
            PROMPT,
            9,
            sampling=replace(sampling, seed=number) if seeded else sampling,
            stop_token_ids=frozenset({END}) if sampling.min_tokens else frozenset(),
            speculation=speculation,
        )
        sequence = engine.submit(request, lambda chunk: _collect(chunk, tokens, finish))

        def finish() -> None:
            done.append(tokens[:LENGTH])
            engine.cancel(sequence)
            start()

    for _ in range(min(CONCURRENT, draws)):
        start()
    while len(done) < draws:
        engine.drain_inbox()
        if laws is not None:
            laws.send()
        engine.step()
        engine.outgoing.tell_clients()


def _collect(chunk: object, tokens: list[int], finish: Callable[[], None]) -> None:
    assert isinstance(chunk, TokenChunk), chunk
    before = len(tokens)
    tokens += chunk.token_ids
    if before < LENGTH and (len(tokens) >= LENGTH or chunk.finish_reason is not None):
        finish()


_MANY = Limits(DepthPolicy("fixed", 5), 16 * CONCURRENT, CONCURRENT, 2 * CONCURRENT)


def make_engine(sampled_rule: AcceptanceRule, trust: bool, limits: Limits = _MANY, page_count: int = 8 * CONCURRENT) -> Engine:
    def deliver(deliveries: list[Delivery]) -> None:
        for sink, argument in deliveries:
            sink(argument)

    # A copy, since a runner takes its model over.
    runner = ModelRunner(copy.deepcopy(tiny_model()), page_size=4, page_count=page_count)
    pool = PagePool(runner.page_count, runner.page_size)
    judge = Judge(sampled_rule)
    # No draft is left out because it would not pay.
    return Engine(runner, pool, deliver, Metrics("exact"), limits, judge, trust_draft_distributions=trust, always_draft=True)


def p_value(samples: npt.NDArray[np.int64], sampling: SamplingParams) -> float:
    """Of the joint distribution of three tokens against exact enumeration; cells that expect fewer than five are merged."""
    laws = exact_laws(sampling)
    ends = sampling.min_tokens > 0
    expected = np.zeros(VOCAB**LENGTH)
    for i, text in enumerate(itertools.product(range(VOCAB), repeat=LENGTH)):
        if not ends or END not in text[:-1]:
            expected[i] = laws[()][text[0]] * laws[text[:1]][text[1]] * laws[text[:2]][text[2]]
    if ends:  # a text that ended is padded with the token that ended it
        for a in range(VOCAB):
            if a != END:
                expected[(a * VOCAB + END) * VOCAB + END] = laws[()][a] * laws[(a,)][END]
        expected[(END * VOCAB + END) * VOCAB + END] = laws[()][END]
    observed = np.bincount(samples @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**LENGTH)
    if observed[expected == 0].any():
        return 0.0
    expected *= len(samples)
    large = expected >= 5
    merged = [np.append(x[large], x[~large].sum()) for x in (observed, expected)]
    keep = merged[1] > 0
    return float(stats.chisquare(merged[0][keep], merged[1][keep]).pvalue)
