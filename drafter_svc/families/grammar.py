"""Drafting what the request's grammar forces: keys, punctuation, the envelope of a tool call.

The family walks the verifier's own grammar. Where that leaves a choice of blanks alone, it guesses
them by the layout of the text so far; among a few values it offers each. The text that it finds is
written in tokens as the model would write it. Everything runs on the event loop, within budgets of
processor time; grammars are compiled on threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from drafter_svc.branching import Branch, offer_likeliest
from drafter_svc.families.base import Family, FamilySettings, Loaded
from drafter_svc.families.forced_text import ForcedText, Path, Speller
from drafter_svc.families.layout import Layout
from drafter_svc.metrics import Metrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError, invalid
from outrider.grammar.backends import TextMatcher
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.kinds import Grammar
from outrider.process.clock import Clock, monotonic, thread_cpu
from outrider.process.config import need_models
from outrider.protocol.model_info import ModelInfo
from outrider.tokenizer import fingerprint, load_tokenizer

log = logging.getLogger(__name__)

# Tokens before the forced text that the tokenizer sees too, and the end of a prompt that is
# searched for the token that ends texts.
_CONTEXT_TOKENS = 4
_PROMPT_TOKENS = 1000
# Bytes that are looked for per token of the window.
_BYTES_PER_TOKEN = 6
# Classes of guesses: within a forced text, and at its end, where a token may become a longer one.
_INNER, _LAST = 0, 1
# First confidences of both. Outcomes move them by a step. Below the least nothing is offered.
_CONFIDENCES = (0.97, 0.7)
_STEP = 0.2
_LEAST = 0.3
# Without branches, a chain ends where the grammar leaves a choice and a token is less likely.
_LEAST_IN_CHAIN = 0.4
# A guess may take so much processor time (seconds). What exceeds it may be at most the second for a
# sequence, and the third for a tenant, who gets a share of the time back. Usual guesses take 0.1 to
# 0.3 ms.
_FREE_S = 0.005
_MOST_S = 0.1
_TENANTS_MOST_S = 0.5
_REFILL = 0.02


class GrammarSettings(FamilySettings):
    """Settings of the family grammar."""

    target: str = ""
    """Directory or hub id of the target; the drafter reads its tokenizer. It must be given."""


class Grammars:
    """What all connections share: the compiled grammars and the target's tokenizer."""

    def __init__(self, target: str, tokenizer: Tokenizer, info: ModelInfo) -> None:
        """Load the libraries, which takes seconds. `info` is of the verifier's model."""
        # The verifier has checked the grammars.
        self.compiler = GrammarCompiler(target, info.vocab_size, info.eos_token_ids, trusted=True)
        self.token_bytes = self.compiler.token_bytes
        self.stops = info.eos_token_ids
        self.forced = ForcedText(self.token_bytes, self.stops, self.compiler.mask_width)
        self.speller = Speller(tokenizer, self.token_bytes)

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """The text of some tokens."""
        return b"".join([self.token_bytes[token] for token in tokens])

    def end_of(self, tokens: Sequence[int]) -> int:
        """The token that ends a text, if the prompt `tokens` has such ends of earlier texts."""
        ends = [token for token in tokens[-_PROMPT_TOKENS:] if token in self.stops]
        return [*self.stops, *ends][-1] if ends else self.stops[0]


@dataclass(eq=False, slots=True)
class _Guess:
    """Tokens that may follow, each with its confidence, and its class if it is forced."""

    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    classes: list[int | None] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Text:
    """A sequence's text in its grammar.

    `matcher` and `layout` have read the first `length` tokens. `guess` was made behind them.
    """

    compiling: asyncio.Task[TextMatcher]
    length: int
    matcher: TextMatcher | None = None
    layout: Layout = field(default_factory=Layout)
    guess: _Guess | None = None
    confidences: list[float] = field(default_factory=lambda: list(_CONFIDENCES))
    excess_s: float = 0.0

    def judge(self, new: Sequence[int]) -> None:
        """Learn from committed tokens how often guesses of each class are right."""
        if self.guess is None:
            return
        for token, right, of in zip(self.guess.tokens, new, self.guess.classes, strict=False):
            if of is not None:
                self.confidences[of] += _STEP * ((token == right) - self.confidences[of])
            if token != right:
                break
        self.guess = None


class _Budget:
    """The processor time that the guesses of each tenant took beyond what is free."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Seconds used, and when that was noted.
        self._used: dict[str, tuple[float, float]] = {}

    def charge(self, tenant: str, seconds: float) -> None:
        """Count time that a tenant used."""
        self._used[tenant] = self._left(tenant) + seconds, self._clock()

    def is_spent(self, tenant: str) -> bool:
        """Whether a tenant has used too much and has not got it back."""
        return tenant in self._used and self._left(tenant) > _TENANTS_MOST_S

    def _left(self, tenant: str) -> float:
        used_s, at = self._used.get(tenant, (0.0, 0.0))
        left_s = max(0.0, used_s - _REFILL * (self._clock() - at))
        if left_s == 0.0:
            self._used.pop(tenant, None)
        return left_s


class GrammarFamily(Family):
    """Drafts for the sequences of one connection that have a grammar; skips all others."""

    name = "grammar"
    settings = GrammarSettings

    def __init__(
        self,
        grammars: asyncio.Future[Grammars],
        cpu_clock: Clock = thread_cpu,
        clock: Clock = monotonic,
    ) -> None:
        self._grammars = grammars
        self._cpu_clock = cpu_clock
        self._budget = _Budget(clock)
        self._texts: dict[int, _Text] = {}

    @classmethod
    async def load(
        cls, settings: GrammarSettings, place: PlacementPlan, metrics: Metrics
    ) -> Loaded:
        """Load the tokenizer. The first connection to a model loads the libraries on a thread."""
        need_models()
        if not settings.target:
            raise invalid("target", "must be given: the drafter reads the target's tokenizer")
        tokenizer = load_tokenizer(settings.target)
        shared: dict[tuple[int, tuple[int, ...]], asyncio.Future[Grammars]] = {}

        def make(info: ModelInfo) -> GrammarFamily:
            key = info.vocab_size, info.eos_token_ids
            if key not in shared:
                loading = asyncio.to_thread(Grammars, settings.target, tokenizer, info)
                shared[key] = asyncio.ensure_future(loading)
            return cls(shared[key])

        return Loaded(make, fingerprint(tokenizer))

    def opened(self, sequence: DraftSequence) -> None:
        """Begin to compile a sequence's grammar."""
        opened = sequence.opened
        if opened.grammar is None or self._budget.is_spent(opened.tenant):
            return
        output = sequence.tokens[opened.prompt_length :]
        compiling = self._compile(opened.grammar, output, opened.tenant)
        self._texts[sequence.id] = _Text(asyncio.ensure_future(compiling), len(sequence.tokens))

    async def _compile(self, grammar: Grammar, output: list[int], tenant: str) -> TextMatcher:
        # Without the shield, a sequence that ends would cancel the loading for all.
        grammars = await asyncio.shield(self._grammars)
        return await grammars.compiler.matcher_async(grammar, output, tenant)

    def committed(self, sequence: DraftSequence, num_valid_tokens: int) -> None:
        """Learn from the committed tokens; `propose` reads them."""
        if text := self._texts.get(sequence.id):
            text.judge(sequence.tokens[text.length :])

    def closed(self, sequence: DraftSequence) -> None:
        """Forget a sequence."""
        if text := self._texts.pop(sequence.id, None):
            text.compiling.cancel()

    async def aclose(self) -> None:
        """Compile no more grammars."""
        for text in self._texts.values():
            text.compiling.cancel()

    async def propose(
        self, sequences: Sequence[DraftSequence], interrupted: Callable[[], bool]
    ) -> None:
        """Offer what the grammar forces, for each sequence whose grammar is compiled."""
        for sequence in sequences:
            text = self._texts.get(sequence.id)
            if text is None or not text.compiling.done():
                continue
            if interrupted():
                sequence.postpone()
                continue
            began = self._cpu_clock()
            goes_on = self._draft(sequence, text)
            excess_s = max(0.0, self._cpu_clock() - began - _FREE_S)
            if excess_s > 0.0:
                text.excess_s += excess_s
                self._budget.charge(sequence.opened.tenant, excess_s)
            if not goes_on or text.excess_s > _MOST_S:
                del self._texts[sequence.id]

    def _draft(self, sequence: DraftSequence, text: _Text) -> bool:
        """Read what was committed and guess behind it; False if there is nothing more to guess."""
        grammars = self._grammars.result()
        if text.matcher is None:
            try:
                text.matcher = text.compiling.result()
            except OutriderError as error:
                log.warning("sequence %d is not drafted for: %s", sequence.id, error)
                return False
            first = sequence.opened.prompt_length
            text.layout.read(grammars.bytes_of(sequence.tokens[first : text.length]))
        new = sequence.tokens[text.length :]
        text.length = len(sequence.tokens)
        if not all(text.matcher.accept(token) for token in new) or text.matcher.ended:
            return False
        text.layout.read(grammars.bytes_of(new))
        if text.guess is None:
            self._offer(sequence, text, grammars)
        return True

    def _offer(self, sequence: DraftSequence, text: _Text, grammars: Grammars) -> None:
        """Extend the chain by the likeliest text, and offer the others as branches."""
        assert text.matcher is not None
        held = len(sequence.guesses)
        most_bytes = _BYTES_PER_TOKEN * (held + sequence.remaining_window)
        paths = grammars.forced.paths(text.matcher, text.layout, most_bytes)
        guesses = [self._spelled(sequence, text, grammars, path) for path in paths]
        main = text.guess = guesses[0]
        count = len(main.tokens)
        if not sequence.wants_tree:
            unlikely = [i for i in range(count) if main.confidences[i] < _LEAST_IN_CHAIN]
            count = min([*unlikely, count])
        if text.confidences[_INNER] < _LEAST or main.tokens[:held] != sequence.guesses:
            return
        sequence.extend(main.tokens[held:count], confidences=main.confidences[held:count])
        branches = [branch for guess in guesses[1:] if (branch := _beside(sequence, guess))]
        if sequence.wants_tree:
            offer_likeliest(sequence, branches)
            return
        for branch in branches:
            sequence.branch(branch.at, branch.run, branch.confidences)

    def _spelled(
        self, sequence: DraftSequence, text: _Text, grammars: Grammars, path: Path
    ) -> _Guess:
        """The tokens of a path, as far as the grammar allows them."""
        assert text.matcher is not None
        context = grammars.bytes_of(sequence.tokens[-_CONTEXT_TOKENS:])
        tokens = grammars.speller.spelled(context, path.text)
        # Where the text was cut, it may be within a token.
        tokens = tokens[:-1] if path.is_cut else tokens
        if path.ends:
            tokens.append(grammars.end_of(sequence.opened.token_ids))
        matcher = text.matcher.fork()
        guess = _Guess()
        at = 0
        for i, token in enumerate(tokens):
            if not matcher.accept(token):
                break
            is_last = i == len(tokens) - 1 and not path.is_cut and not path.ends
            of = _LAST if is_last else _INNER
            end = at + max(1, len(grammars.token_bytes[token]))
            chance = path.chance_within(at, end)
            if is_last and text.confidences[_LAST] < _LEAST:
                break
            guess.tokens.append(token)
            guess.confidences.append(text.confidences[of] * chance)
            guess.classes.append(of if chance == 1.0 else None)
            at = end
        return guess


def _beside(sequence: DraftSequence, guess: _Guess) -> Branch | None:
    """What a guess has beside the chain; None if it is a part of the chain or goes behind it."""
    chain = sequence.guesses
    at = 0
    while at < min(len(chain), len(guess.tokens)) and chain[at] == guess.tokens[at]:
        at += 1
    if at == min(len(chain), len(guess.tokens)):
        return None
    return Branch(at, guess.tokens[at:], guess.confidences[at:])
