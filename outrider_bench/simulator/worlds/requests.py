"""The requests that simulated worlds send, and the target's answers to them.

All worlds share one catalogue, so a process computes each answer once. The answer comes from the
production engine without drafters, faults or other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

from outrider.errors import OutriderError
from outrider.grammar.backends import Mask
from outrider.lm.pages import PagePool
from outrider.protocol.messages import (
    FinishReason,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
)
from outrider_bench.simulator.events import Events
from outrider_bench.simulator.worlds.target import EOS, VOCAB, PagedTarget
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import VerifierMetrics

REQUEST_COUNT = 240
_LONGEST_PROMPT = 40
_MOST_TOKENS = 48
_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """The target's answer to a request."""

    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]


@cache
def request_of(number: int) -> TokenRequest:
    """Return the catalogue's request `number`.

    Many prompts begin alike, to test the prefix cache.
    """
    draw = Random(f"request {number}")
    stem = Random(f"stem {draw.randrange(3)}").choices(range(VOCAB), k=_LONGEST_PROMPT - 8)
    prompt = stem[: draw.choice([0, 5, len(stem)])]
    prompt = [*prompt, *draw.choices(range(VOCAB), k=draw.randint(1, 8))]
    scores = draw.random() < 0.1
    return TokenRequest(
        prompt,
        max_tokens=draw.choice([1, 2, 16, 32, _MOST_TOKENS]),
        sampling=_sampling(draw),
        stop_token_ids=frozenset(draw.sample(range(VOCAB), draw.choice([0, 0, 1]))),
        ignore_eos=draw.random() < 0.7,
        top_logprobs=draw.choice([None, None, None, None, None, 2]),
        prompt_logprobs=1 if scores else None,
        noise_seed=number,
    )


def _sampling(draw: Random) -> SamplingParams:
    """Draw greedy, seeded or sampled settings; half of them adjust the logits."""
    temperature = draw.choice([0.0, 0.0, 0.0, 0.5, 1.0, 1.5])
    adjusts = draw.random() < 0.5
    return SamplingParams(
        temperature=temperature,
        top_k=draw.choice([0, 0, 3, 10]),
        top_p=draw.choice([1.0, 1.0, 0.8]),
        seed=draw.choice([None, draw.getrandbits(63)]),
        min_p=draw.choice([0.0, 0.0, 0.05]),
        repetition_penalty=draw.choice([1.0, 1.3]) if adjusts else 1.0,
        presence_penalty=draw.choice([0.0, 0.7]) if adjusts else 0.0,
        frequency_penalty=draw.choice([0.0, -0.4]) if adjusts else 0.0,
        logit_bias=((draw.randrange(VOCAB), 2.0),) if adjusts else (),
        min_tokens=draw.choice([0, 4]) if adjusts else 0,
        banned_token_ids=(draw.randrange(VOCAB - 1),) if adjusts else (),
    )


def wanted_tokens(number: int) -> int:
    """Return the maximum number of tokens that a request can have, prompt included."""
    request = request_of(number)
    return len(request.prompt) + request.max_tokens


@cache
def modulus_of(number: int) -> int:
    """Return the modulus of a request's grammar; 0 without a grammar."""
    draw = Random(f"grammar {number}")
    if draw.random() < 0.85 or request_of(number).sampling.adjusts:
        return 0
    return draw.randint(2, 4)


def matcher_of(number: int, committed: Sequence[int]) -> ResidueMatcher | None:
    """Return the state of a request's grammar after committed tokens; None without a grammar."""
    if modulus_of(number) == 0:
        return None
    matcher = ResidueMatcher(modulus_of(number))
    for token in committed:
        matcher.accept(token)
    return matcher


class ResidueMatcher:
    """A grammar whose tokens have the residues 0, 1, 2, ... of a modulus in turn, until the end."""

    def __init__(self, modulus: int) -> None:
        self._modulus = modulus
        self._tokens: list[int] = []

    @property
    def ended(self) -> bool:
        """True if an end token has ended the output."""
        return bool(self._tokens) and self._tokens[-1] == EOS

    def accept(self, token_id: int) -> bool:
        """Like `Matcher.accept`."""
        allowed = not self.ended and token_id in self._allowed()
        if allowed:
            self._tokens.append(token_id)
        return allowed

    def rollback(self, count: int) -> None:
        """Like `Matcher.rollback`."""
        del self._tokens[len(self._tokens) - count :]

    def fill(self, mask_RW: Mask, row: int) -> None:
        """Like `Matcher.fill`."""
        word = sum([1 << token for token in self._allowed()])
        mask_RW[row] = word - (word >> 31 << 32)

    def _allowed(self) -> list[int]:
        residue = len(self._tokens) % self._modulus
        return [*range(residue, EOS, self._modulus), EOS]


@cache
def answer_of(number: int) -> Answer:
    """Return the target's answer. Raises OutriderError if the engine refuses the request."""
    events = Events()
    page_count = -(-(_LONGEST_PROMPT + _MOST_TOKENS) // _PAGE_SIZE)
    pool = PagePool(page_count, _PAGE_SIZE)
    target = PagedTarget(events, page_count, _PAGE_SIZE)
    chunks: list[TokenChunk] = []

    def receive(message: TokenChunk | OutriderError) -> None:
        if isinstance(message, OutriderError):
            raise message
        chunks.append(message)

    def deliver(deliveries: list[Delivery]) -> None:
        for sink, message in deliveries:
            sink(message)

    engine = Engine(target, pool, deliver, VerifierMetrics("alone"), clock=events.clock)
    engine.submit(request_of(number), receive, matcher=matcher_of(number, ()))
    while engine.sequences:
        engine.step()
    engine.outbox.send_to_clients()
    finish_reason = chunks[-1].finish_reason
    if finish_reason is None:
        raise RuntimeError(f"request {number} ended without a finish reason")
    return Answer(
        [token for chunk in chunks for token in chunk.token_ids],
        finish_reason,
        [logprob for chunk in chunks for logprob in chunk.logprobs],
        [logprob for chunk in chunks for logprob in chunk.prompt_logprobs],
    )
