"""Drafts the text that the request's grammar forces: keys, punctuation, parts of a tool call.

The family walks the verifier's own grammar. Where the grammar leaves only a choice of whitespace,
the family guesses the whitespace from the layout of the text so far. Where the grammar leaves a few
values, the family offers each of them. The family writes the text that it finds in the tokens that
the model would use. Grammars are compiled on threads. All other work runs on the event loop, within
budgets of processor time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from drafter_svc.branching import Branch, offer_likeliest
from drafter_svc.families.base import Family, Loaded
from drafter_svc.families.forced_text import ForcedText, Path, Speller
from drafter_svc.families.json_whitespace import AfterThought, Layout
from drafter_svc.families.settings import GrammarSettings
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError, invalid
from outrider.grammar.backends import TextMatcher
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.kinds import Grammar
from outrider.process.clock import Clock, monotonic, thread_cpu
from outrider.process.settings.config import need_models
from outrider.tokenizer import end_token_ids, fingerprint, load_tokenizer

log = logging.getLogger(__name__)

# The tokenizer also sees this many tokens before the forced text. `end_of` looks for the token that
# ends texts among the last `_PROMPT_TOKENS` tokens of a prompt.
_CONTEXT_TOKENS = 4
_PROMPT_TOKENS = 1000
# A guess looks for this many bytes of forced text: `_BYTES_PER_TOKEN` for each token of the window,
# and some more, since the last word may be cut. If the word is cut, the guess leaves out all tokens
# that reach into the additional bytes.
_BYTES_PER_TOKEN = 6
_MORE_BYTES = 24
# Classes of guesses: a token within a forced text; a token at its end, which may become a longer
# token; and a token where the grammar left a choice.
_INNER, _LAST, _CHOSEN = 0, 1, 2
# Each class begins with this rate of right guesses. For choices the rate is relative to their
# probabilities. Each outcome moves the rate by a step. Guesses of a class whose rate is below
# `_LEAST` are not offered, but they are still judged, so that the rate can rise again.
_RATES = (0.97, 0.7, 1.0)
_STEP = 0.25
_LEAST = 0.4
# A chain or branch ends before a token whose probability of being committed is less than this.
_LEAST_CUMULATIVE = 0.3
# Seconds of processor time. A guess usually takes 0.2 ms. The first `_FREE_S` seconds of each guess
# are free. A sequence that has taken more than `_MOST_S` beyond that gets no more guesses. While a
# tenant has taken more than `_TENANTS_MOST_S` beyond that, the tenant's new sequences get none. In
# each second a tenant gets `_REFILL` seconds back.
_FREE_S = 0.005
_MOST_S = 0.1
_TENANTS_MOST_S = 0.5
_REFILL = 0.02


class Grammars:
    """What all connections share: the compiled grammars and the target's tokenizer."""

    def __init__(self, target: str) -> None:
        """Load the libraries and the tokenizer of a directory or hub id, which takes seconds.

        Raises OutriderError(MODEL_NOT_FOUND) if `target` names no model.
        """
        tokenizer = load_tokenizer(target)
        vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self.fingerprint = fingerprint(tokenizer)
        self.stops = end_token_ids(target, vocab_size)
        # The verifier has checked the grammars.
        self.compiler = GrammarCompiler(target, vocab_size, self.stops, trusted=True)
        self.token_bytes = self.compiler.token_bytes
        self.forced = ForcedText(self.token_bytes, self.stops, self.compiler.mask_width)
        self.speller = Speller(tokenizer, self.token_bytes)

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of some tokens."""
        return b"".join([self.token_bytes[token] for token in tokens])

    def end_of(self, tokens: Sequence[int]) -> int:
        """Return the last end token near the end of `tokens`; if there is none, `stops[0]`."""
        ends = [token for token in tokens[-_PROMPT_TOKENS:] if token in self.stops]
        return ends[-1] if ends else self.stops[0]


@dataclass(frozen=True, slots=True)
class _Guess:
    """A token that may follow. `of` is the guess's class, `chance` its probability."""

    token: int
    chance: float
    of: int


@dataclass(eq=False, slots=True)
class _Text:
    """The state of a sequence's text in its grammar.

    `matcher` and `layout` have read the first `length` tokens. `guesses` were made after these
    tokens; None before any were made.
    """

    compiling: asyncio.Task[TextMatcher | None]
    length: int
    answer: AfterThought
    matcher: TextMatcher | None = None
    layout: Layout = field(default_factory=Layout)
    guesses: list[_Guess] | None = None
    rates: list[float] = field(default_factory=lambda: list(_RATES))
    excess_s: float = 0.0

    def judge(self, new: Sequence[int]) -> None:
        """Learn from committed tokens how often guesses of each class are right."""
        for guess, token in zip(self.guesses or (), new, strict=False):
            is_right = guess.token == token
            rate = self.rates[guess.of]
            self.rates[guess.of] = min(1.0, rate + _STEP * (is_right - rate * guess.chance))
            if not is_right:
                break
        self.guesses = None

    def branch(self, guesses: Sequence[_Guess], at: int) -> Branch:
        """Return the guesses from `at` on as a branch, cut before the first that is likely wrong.

        A guess is likely wrong if the rate of its class is below `_LEAST`.
        """
        end = next((i for i, each in enumerate(guesses) if self.rates[each.of] < _LEAST), None)
        run = guesses[at:end]
        confidences = [self.rates[each.of] * each.chance for each in run]
        return Branch(at, [each.token for each in run], confidences)


class GrammarFamily(Family):
    """Drafts for the sequences of one connection that have a grammar; skips other sequences."""

    name = "grammar"
    requires_grammar = True
    settings = GrammarSettings

    def __init__(
        self, grammars: Grammars, cpu_clock: Clock = thread_cpu, clock: Clock = monotonic
    ) -> None:
        self._grammars = grammars
        self._cpu_clock = cpu_clock
        self._clock = clock
        # Maps a tenant to the time when it will have regained all processor time that its guesses
        # took beyond the free time.
        self._repaid: dict[str, float] = {}
        self._texts: dict[int, _Text] = {}

    @classmethod
    async def load(
        cls, settings: GrammarSettings, place: PlacementPlan, metrics: DrafterMetrics
    ) -> Loaded:
        """Load the grammar libraries and the target's tokenizer."""
        need_models()
        if not settings.target:
            raise invalid("target", "must be given: the drafter reads the target's tokenizer")
        grammars = await asyncio.to_thread(Grammars, settings.target)
        return Loaded(lambda info: cls(grammars), grammars.fingerprint)

    def opened(self, sequence: DraftSequence) -> None:
        """Start to compile a sequence's grammar."""
        opened = sequence.opened
        debt_s = _REFILL * (self._repaid.get(opened.tenant, 0.0) - self._clock())
        if opened.grammar is not None and debt_s <= _TENANTS_MOST_S:
            compiling = asyncio.ensure_future(self._compile(sequence, opened.grammar))
            answer = AfterThought(opened.grammar.thought)
            self._texts[sequence.id] = _Text(compiling, len(sequence.tokens), answer)

    async def _compile(self, sequence: DraftSequence, grammar: Grammar) -> TextMatcher | None:
        """Return a matcher that has read the sequence's text.

        Return None if the grammar cannot be compiled.
        """
        output = sequence.tokens[sequence.opened.prompt_length :]
        try:
            compiler = self._grammars.compiler
            return await compiler.matcher_async(grammar, output, sequence.opened.tenant)
        except OutriderError as error:
            log.warning("sequence %d is not drafted for: %s", sequence.id, error)
            return None

    def committed(self, sequence: DraftSequence, num_valid_tokens: int) -> None:
        """Learn which guesses were right. The matcher reads the tokens later, in `propose`."""
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
        """Offer the forced tokens of each sequence whose grammar is compiled."""
        for sequence in sequences:
            text = self._texts.get(sequence.id)
            if text is None or not text.compiling.done():
                continue
            if interrupted():
                sequence.postpone()
                continue
            began = self._cpu_clock()
            goes_on = self._draft(sequence, text)
            self._charge(sequence, text, self._cpu_clock() - began)
            if not goes_on or text.excess_s > _MOST_S:
                del self._texts[sequence.id]

    def _charge(self, sequence: DraftSequence, text: _Text, seconds: float) -> None:
        """Charge a guess's processor time, less the free time, to its sequence and tenant."""
        excess_s = seconds - _FREE_S
        if excess_s > 0.0:
            text.excess_s += excess_s
            now = self._clock()
            self._repaid = {tenant: at for tenant, at in self._repaid.items() if at > now}
            tenant = sequence.opened.tenant
            self._repaid[tenant] = self._repaid.get(tenant, now) + excess_s / _REFILL

    def _draft(self, sequence: DraftSequence, text: _Text) -> bool:
        """Read the committed tokens and guess; return False if there is nothing more to guess."""
        bytes_of = self._grammars.bytes_of
        if text.matcher is None:
            text.matcher = text.compiling.result()
            if text.matcher is None:
                return False
            output = sequence.tokens[sequence.opened.prompt_length : text.length]
            text.layout.read(text.answer.read(bytes_of(output)))
        new = sequence.tokens[text.length :]
        text.length = len(sequence.tokens)
        if not all(text.matcher.accept(token) for token in new) or text.matcher.ended:
            return False
        text.layout.read(text.answer.read(bytes_of(new)))
        if text.guesses is None:
            self._offer(sequence, text, text.matcher)
        return True

    def _offer(self, sequence: DraftSequence, text: _Text, matcher: TextMatcher) -> None:
        """Extend the chain by the likeliest text, and offer the other texts as branches."""
        held = len(sequence.guesses)
        most_bytes = _BYTES_PER_TOKEN * (held + sequence.remaining_window) + _MORE_BYTES
        paths = self._grammars.forced.paths(matcher, text.layout, most_bytes)
        main, *others = [self._spelled(sequence, path, matcher.fork()) for path in paths]
        text.guesses = main
        if [each.token for each in main[:held]] != sequence.guesses:
            # Some guesses outlived the commit, and the verifier prefers them to later guesses.
            return
        run = _likely(text.branch(main, held), 0, more=sequence.wants_tree)
        sequence.extend(run.run, confidences=run.confidences)
        places = [(guesses, _common(sequence.guesses, guesses)) for guesses in others]
        branches = [
            _likely(text.branch(guesses, at), 1)
            for guesses, at in places
            if at < min(len(sequence.guesses), len(guesses))
        ]
        if sequence.wants_tree:
            offer_likeliest(sequence, [branch for branch in branches if branch.run])
            return
        for branch in branches:
            sequence.branch(branch.at, branch.run, branch.confidences)

    def _spelled(self, sequence: DraftSequence, path: Path, matcher: TextMatcher) -> list[_Guess]:
        """Return the tokens of a path, as far as the grammar allows them."""
        grammars = self._grammars
        context = grammars.bytes_of(sequence.tokens[-_CONTEXT_TOKENS:])
        tokens = grammars.speller.spelled(context, path.text)
        if path.is_cut:
            # The last word may be cut, and then has other tokens than the whole word.
            ends = itertools.accumulate(len(grammars.token_bytes[token]) for token in tokens)
            most = len(path.text) - _MORE_BYTES
            tokens = tokens[: sum(end <= most for end in ends)]
        if path.ends:
            tokens.append(grammars.end_of(sequence.opened.token_ids))
        guesses: list[_Guess] = []
        begin = 0
        for token in tokens:
            if not matcher.accept(token):
                return guesses
            end = begin + max(1, len(grammars.token_bytes[token]))
            chance = path.chance_within(begin, end)
            guesses.append(_Guess(token, chance, _INNER if chance == 1.0 else _CHOSEN))
            begin = end
        if guesses and not (path.is_cut or path.ends):
            guesses[-1] = replace(guesses[-1], of=_LAST)
        return guesses


def _common(chain: Sequence[int], guesses: Sequence[_Guess]) -> int:
    """Return the length of the common beginning of `guesses` and the chain."""
    at = 0
    while at < min(len(chain), len(guesses)) and chain[at] == guesses[at].token:
        at += 1
    return at


def _likely(branch: Branch, first: int, *, more: bool = False) -> Branch:
    """Return the branch, cut before the first token that is unlikely to be committed.

    The first `first` tokens always stay, and count as certain. With `more`, one unlikely token
    stays, so that there can be branches beside it.
    """
    cumulative_values = itertools.accumulate(branch.confidences[first:], operator.mul)
    count = first + more + sum(cumulative >= _LEAST_CUMULATIVE for cumulative in cumulative_values)
    return Branch(branch.at, branch.run[:count], branch.confidences[:count])
