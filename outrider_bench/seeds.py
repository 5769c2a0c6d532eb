"""`outrider bench --only seeds`: how often a seed's text depends on batch, drafts, chunks, cache.

The noise of a seed is the same everywhere, but forward passes round differently in different
batches. Texts are compared with those of the same requests run plainly and alone, in process, at
temperature 1. The results are counts, not times.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from outrider.draft_messages import DraftBatch, Hello, Proposal, StepBatch
from outrider.draft_tokens_policy import DraftTokensPolicy
from outrider.errors import OutriderError
from outrider.launch.prompts import DEMO_PROMPTS
from outrider.lm.pages import PagePool
from outrider.lm.runner import ModelRunner
from outrider.messages import SamplingParams, SpeculationOptions, TokenChunk, TokenRequest
from outrider.tokenizer import load_tokenizer
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outgoing import Delivery
from verifier_svc.engine.target import Limits
from verifier_svc.metrics import Metrics

_TEXTS = 32
_VOCAB_STRIDE = 7


class Case(NamedTuple):
    """How requests are run.

    `draft_tokens` is the length of drafts, 0 without any; `chunk` bounds the tokens of a step;
    `times` repeats the prompts.
    """

    name: str
    batch: int = 1
    draft_tokens: int = 0
    chunk: int = 512
    times: int = 1


_ALONE = Case("alone, plain")
_CASES = (
    Case("batch 8", batch=8),
    Case("drafts of 3, alone", draft_tokens=3),
    Case("drafts of 8, batch 8", batch=8, draft_tokens=8),
    Case("prompts in chunks of 16", chunk=16),
    Case("cached prefix, batch 8, drafts of 4", batch=8, draft_tokens=4, times=2),
)


class Count(NamedTuple):
    """Texts that differ, and all texts; tokens drawn until a text ended or differed.

    Then the draft tokens and prompt tokens that saved work.
    """

    differing: int
    texts: int
    draws: int
    accepted: int
    cached: int


def measure(
    models: Path, tokens: int, dtypes: Sequence[str] = ("float32", "bfloat16")
) -> tuple[Table, dict[str, Any]]:
    """Count the texts that differ for each case, path of the forward and dtype.

    Returns a table to print, and the same as data.
    """
    prompts = _prompts(models / "target")
    columns = list(_columns(models / "target", dtypes))
    table = Table(
        title=f"texts of {tokens} tokens that differ from the same request's alone; "
        "draws until one differs"
    )
    table.add_column("case")
    found: dict[str, Any] = {}
    for name, runner in columns:
        table.add_column(name)
        reference = {
            answer.number: answer.tokens for answer in _run(runner, _ALONE, prompts, tokens, {})
        }
        found[name] = {
            case.name: _compare(runner, case, prompts, tokens, reference)._asdict()
            for case in _CASES
        }
    for case in _CASES:
        counts = [Count(**found[name][case.name]) for name, _ in columns]
        table.add_row(case.name, *(f"{c.differing} of {c.texts}, {_rate(c)}" for c in counts))
    return table, found


def _rate(count: Count) -> str:
    """The rate of draws that differ; if none did, its upper bound at 95 % confidence, 3 / draws."""
    if count.differing == 0:
        return f"< {3 / count.draws:.1e} a draw"
    return f"{count.differing / count.draws:.1e} a draw"


def _prompts(target: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(str(target))
    texts = [prompt for _, prompt in DEMO_PROMPTS]
    return [tokenizer.encode(texts[i % len(texts)]).ids for i in range(_TEXTS)]


def _columns(target: Path, dtypes: Sequence[str]) -> Iterator[tuple[str, ModelRunner]]:
    """Each path that the forward can take here, in each dtype."""
    for dtype in dtypes:
        runner = ModelRunner.load(str(target), dtype=dtype)
        if runner.decoder is not None:
            yield f"own CPU kernels, {dtype}", runner
            runner = ModelRunner.load(str(target), dtype=dtype)
            runner.decoder = None
        yield f"{'torch' if runner.device.type == 'cpu' else runner.device.type}, {dtype}", runner


def _compare(
    runner: ModelRunner,
    case: Case,
    prompts: list[list[int]],
    tokens: int,
    reference: dict[int, list[int]],
) -> Count:
    differing = draws = 0
    answers = _run(runner, case, prompts, tokens, reference)
    for answer in answers:
        text, expected = answer.tokens, reference[answer.number]
        pairs = zip(text, expected, strict=True)
        same = next((i for i, (ours, its) in enumerate(pairs) if ours != its), None)
        differing += same is not None
        draws += tokens if same is None else same + 1
    accepted = sum(answer.accepted for answer in answers)
    cached = sum(answer.cached for answer in answers)
    return Count(differing, len(answers), draws, accepted, cached)


def _run(
    runner: ModelRunner,
    case: Case,
    prompts: list[list[int]],
    tokens: int,
    reference: dict[int, list[int]],
) -> list[_Answer]:
    """Run the requests; returns their answers in the order in which they ended."""
    engine = _engine(runner, case)
    if case.draft_tokens:
        _Guesser(engine, prompts, reference, case.draft_tokens)
    found: list[_Answer] = []
    waiting = [number for _ in range(case.times) for number in range(len(prompts))]
    under_way: list[_Answer] = []
    while waiting or under_way:
        while waiting and len(under_way) < case.batch:
            under_way.append(_Answer(waiting.pop(0)))
            engine.submit(_request(under_way[-1].number, prompts, tokens), under_way[-1])
        engine.drain_inbox()
        engine.step()
        found += [answer for answer in under_way if len(answer.tokens) == tokens]
        under_way = [answer for answer in under_way if len(answer.tokens) < tokens]
    return found


@dataclass
class _Answer:
    """Collects a request's tokens; its number is its seed, too."""

    number: int
    tokens: list[int] = field(default_factory=list)
    accepted: int = 0
    cached: int = 0

    def __call__(self, message: TokenChunk | OutriderError) -> None:
        if isinstance(message, OutriderError):
            raise message
        self.tokens += message.token_ids
        if message.stats is not None:
            self.accepted = message.stats.accepted_token_count
            self.cached = message.cached_token_count


def _request(number: int, prompts: list[list[int]], tokens: int) -> TokenRequest:
    return TokenRequest(
        prompts[number],
        tokens,
        SamplingParams(1.0, seed=number),
        ignore_eos=True,
        speculation=SpeculationOptions(),
        # Alone, a prompt of another tenant is not in the cache; `_Guesser` finds the request by it.
        tenant=str(number),
    )


def _engine(runner: ModelRunner, case: Case) -> Engine:
    def deliver(deliveries: list[Delivery]) -> None:
        for sink, message in deliveries:
            sink(message)

    limits = Limits(DraftTokensPolicy("fixed", max(case.draft_tokens, 1)), case.chunk)
    pool = PagePool(runner.page_count, runner.page_size)
    return Engine(runner, pool, deliver, Metrics("seeds"), limits, always_draft=True)


class _Guesser:
    """A drafter in this process that knows the reference text.

    Every other guess has one wrong token.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        reference: dict[int, list[int]],
        draft_tokens: int,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._reference = reference
        self._draft_tokens = draft_tokens
        self._random = random.Random(0)
        self._numbers: dict[int, int] = {}
        self._drafter = engine.drafting.join(Hello("seeds", "seeds", "", 16), self._told)

    def _told(self, step: StepBatch | OutriderError) -> None:
        if isinstance(step, OutriderError):
            raise step
        proposals = []
        for opened in step.opened:
            self._numbers[opened.sequence_id] = int(opened.tenant)
            proposals.append(self._guess(opened.sequence_id, opened.prompt_length))
        for verdict in step.verdicts:
            proposals.append(self._guess(verdict.sequence_id, verdict.committed_length))
        batch = DraftBatch([proposal for proposal in proposals if proposal.token_ids])
        self._engine.post(lambda: self._engine.drafting.on_drafts(self._drafter, batch))

    def _guess(self, sequence_id: int, length: int) -> Proposal:
        number = self._numbers[sequence_id]
        start = length - len(self._prompts[number])
        tokens = list(self._reference[number][start : start + self._draft_tokens])
        if tokens and self._random.random() < 0.5:
            at = self._random.randrange(len(tokens))
            tokens[at] = (tokens[at] + _VOCAB_STRIDE) % self._engine.model.vocab_size
        return Proposal(sequence_id, length, tokens)
