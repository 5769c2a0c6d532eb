"""Drafting with a smaller model of the same tokenizer: one forward a guessed token, for all sequences at once."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from drafter_svc.chain import Chain
from drafter_svc.families.base import Failures
from drafter_svc.followed_grammar import FollowedGrammar
from drafter_svc.outcomes import fan_out
from outrider import telemetry
from outrider.errors import OutriderError
from outrider.grammar import GrammarCompiler
from outrider.lm.pages import KVSequence, PagePool
from outrider.lm.runner import ModelRunner, Slice
from outrider.logits import Context, adjust
from outrider.messages import MAX_DEPTH, DraftBatch, Opened, Rule, SparseDistribution, Verdict
from outrider.sampling import Purpose, coupled_keys, coupled_sample, inverse_cdf, target_probs, uniforms
from outrider.tensors import on

log = logging.getLogger(__name__)

# Other tokens that are remembered for each guessed one.
_ALTERNATIVES = 3


@dataclass(eq=False, slots=True)
class _Draft:
    """A sequence's chain, its cache, and the run it is growing; or a branch beside the chain, with both of its own.

    `at` is None for the chain itself; a branch hangs below so many tokens of `chain.ahead` and begins with the first of its run.
    `foreign`: it has ids that the draft model does not know.
    """

    chain: Chain
    seed: int
    foreign: bool
    at: int | None = None
    kv: KVSequence = field(default_factory=KVSequence)
    run: list[int] = field(default_factory=list)
    grammar: FollowedGrammar | None = None
    distributions: list[SparseDistribution] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)
    """For each token of the run, what the draft model thought likeliest besides."""
    others_ahead: list[list[int]] = field(default_factory=list)
    """The same for the first tokens of `chain.ahead`."""
    branches: dict[tuple[int, int], _Draft] = field(default_factory=dict)
    """Those of the chain, by place and first token, until the next verdict."""
    enumerated: tuple[int, int] = (-1, 0)
    """The epoch and length for which outcomes were guessed."""
    draw_count: int = 0
    """Tokens that were sampled."""
    stuck: bool = False
    """Whether no token may follow the run, so that there is nothing more to guess."""

    @property
    def id(self) -> int:
        """The sequence's."""
        return self.chain.opened.sequence_id

    @property
    def guessed(self) -> list[int]:
        """What follows the committed tokens."""
        return [*self.chain.ahead[: self.at], *self.run]

    @property
    def length(self) -> int:
        """Tokens there are: committed, proposed, and those of the run."""
        proposed = len(self.chain.ahead) if self.at is None else self.at
        return len(self.chain.tokens) + proposed + len(self.run)

    @property
    def goal(self) -> int:
        """Length of the run to grow: what the verifier takes in one step, or one such portion further ahead."""
        chain = self.chain
        if self.at is not None:
            return 1 + chain.depth
        portion = chain.depth - len(chain.ahead) if chain.urgent else chain.depth
        return min(portion, chain.room)

    def unread(self, limit: int) -> list[int]:
        """The first `limit` of the tokens that the cache lacks."""
        start, committed = self.kv.length, self.chain.tokens
        if start >= len(committed):
            return self.guessed[start - len(committed) :][:limit]
        return [*committed[start : start + limit], *self.guessed][:limit]

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is all that is wanted: greedy, nothing to bend the choice, no outcomes to prepare for."""
        chain = self.chain
        if self.at is not None or chain.window.depth > chain.depth or self.grammar is not None:
            return False
        return self.rule is Rule.ONE_HOT and Context(chain.opened.sampling).plain

    @property
    def rule(self) -> Rule:
        """How to propose; the likeliest tokens are all that greedy decoding ever takes. Outcomes are never sampled."""
        greedy = self.chain.opened.sampling.greedy or (self.at is not None and self.chain.opened.rule is Rule.SPARSE)
        return Rule.ONE_HOT if greedy else self.chain.opened.rule


@dataclass(frozen=True, slots=True)
class _Guess:
    """A token, the likeliest ones at its place, and what it was sampled from (None if it was not)."""

    token: int
    likeliest: list[int]
    distribution: SparseDistribution | None = None


class ModelFamily:
    """`max_batch_tokens` bounds one forward, `max_entries` the sparse distribution that goes with a sampled token, `branch_count`
    the outcomes that are prepared for while a draft is verified.
    """

    name = "model"
    distributions = frozenset(Rule)
    max_depth = MAX_DEPTH

    def __init__(
        self,
        runner: ModelRunner,
        thread: ThreadPoolExecutor,
        vocab_size: int,
        *,
        max_batch_tokens: int = 512,
        max_entries: int = 32,
        grammars: GrammarCompiler | None = None,
        branch_count: int = 4,
    ) -> None:
        """`thread` is the one worker that `runner` was loaded on. Ids from `vocab_size` on, the target's, are never proposed.

        With `grammars`, what a request's grammar forbids is not proposed either.
        """
        self._runner = runner
        self._thread = thread
        self.device = str(runner.device)
        self._pool = PagePool(self._runner.page_count, self._runner.page_size)
        self._max_batch_tokens = max_batch_tokens
        self._max_entries = max_entries
        self._grammars = grammars
        self._branch_count = branch_count
        self._vocab_size = vocab_size
        self._drafts: dict[int, _Draft] = {}
        # A device that failed does nothing more for this process, which whoever supervises it starts anew.
        self.failures = Failures(self.close, fatal=(torch.AcceleratorError,))

    def open(self, opened: Opened) -> None:
        seed = opened.sampling.seed if opened.sampling.seed is not None else secrets.randbits(64)
        draft = _Draft(Chain(opened), seed, foreign=max(opened.token_ids) >= self._runner.vocab_size)
        self._pool.attach_prefix(draft.kv, draft.chain.tokens, opened.tenant)
        self._drafts[opened.sequence_id] = draft

    def verdict(self, verdict: Verdict) -> None:
        if draft := self._drafts.get(verdict.sequence_id):
            held = len(draft.chain.tokens)
            standing = draft.chain.apply(verdict)
            new = verdict.new_token_ids
            draft.foreign |= max(new, default=0) >= self._runner.vocab_size
            missed = standing - held < len(new)
            draft.others_ahead = [] if missed else draft.others_ahead[len(new) :]
            branch = draft.branches.get((standing - held, new[standing - held])) if missed else None
            if branch is not None and draft.chain.ahead:
                # What was foreseen has a cache of its own, which goes on where the chain's would have to be rewound.
                draft.kv, branch.kv = branch.kv, draft.kv
            elif standing < draft.kv.length:
                with telemetry.start("rewind", verdict.traceparent, outrider__epoch=verdict.epoch, outrider__kept_tokens=standing):
                    self._pool.truncate(draft.kv, standing)
            self._drop_branches(draft)

    def _drop_branches(self, draft: _Draft) -> None:
        for branch in draft.branches.values():
            self._pool.free(branch.kv)
        draft.branches.clear()

    def close(self, sequence_id: int) -> None:
        if draft := self._drafts.pop(sequence_id, None):
            self._drop_branches(draft)
            self._pool.free(draft.kv)

    async def aclose(self) -> None:
        self._drafts.clear()

    async def draft(self, interrupted: Callable[[], bool]) -> DraftBatch:
        """One round for the sequences the verifier may be waiting for; when there are none, the others run ahead."""
        batch = DraftBatch()
        candidates: list[_Draft] = []
        for sequence_id, draft in list(self._drafts.items()):
            with self.failures.of(sequence_id):
                if run := draft.chain.resend():
                    batch.proposals.append(run)
                elif draft.chain.room > 0:
                    candidates.append(draft)
        if batch.proposals:
            return batch
        for draft in [d for d in candidates if d.foreign or d.length >= self._runner.context_length]:
            batch.skips.append(draft.chain.skip())
            candidates.remove(draft)
        chosen = [draft for draft in candidates if draft.chain.urgent]
        if not chosen:
            # While the verifier is at work: the chain goes on, and what else may come of that work is prepared for.
            chosen = candidates
            for sequence_id, draft in list(self._drafts.items()):
                with self.failures.of(sequence_id):
                    chosen += self._outcomes(draft) if not draft.foreign else []
        if chosen:
            started = time.monotonic()
            failed = await asyncio.get_running_loop().run_in_executor(self._thread, self._grow, chosen, interrupted)
            for draft, error in failed:
                self.failures.add(draft.id, error)
            for draft in chosen:
                if draft.id in self._drafts:
                    with self.failures.of(draft.id):
                        self._collect(draft, batch, time.monotonic() - started)
        return batch

    def _collect(self, draft: _Draft, batch: DraftBatch, seconds: float) -> None:
        """Turn what was grown into a proposal; a sequence that got no pages, or where nothing may follow, is skipped."""
        if draft.at is not None:
            # Without a guess behind it a branch is of no use, and the window may have filled since it was begun.
            if len(draft.run) > 1 and draft.chain.side_room >= len(draft.run):
                batch.proposals.append(draft.chain.branch(draft.at, draft.run, seconds))
            return
        # Looked at before the run is taken: what the run needs no more is no reason to skip.
        skipped = draft.stuck or not (draft.run or self._fits(draft))
        if draft.run:
            batch.proposals.append(draft.chain.grow(draft.run, draft.distributions, seconds))
            draft.others_ahead += draft.others
            draft.run, draft.distributions, draft.others = [], [], []
        if skipped:
            batch.skips.append(draft.chain.skip())

    def _outcomes(self, draft: _Draft) -> list[_Draft]:
        """Branches for what may be committed beside the chain: the likeliest other tokens at each place, by `fan_out`.

        They are guessed once for each verdict, and only while there is plenty of cache. What comes behind a draft that stands as a
        whole is for the chain, which grows in the same forwards.
        """
        chain, pool = draft.chain, self._pool
        now = (chain.epoch, len(chain.tokens))
        places = min(chain.depth, len(draft.others_ahead) - 1)
        ahead = chain.window.depth > chain.depth and places >= 0
        if draft.enumerated == now or not ahead or pool.free_count < pool.page_count // 2:
            return []
        draft.enumerated = now
        budget = min(self._branch_count, (chain.side_room - chain.room) // (1 + chain.depth))
        for at, count in enumerate(fan_out(chain.acceptance, places, max(budget, 0))):
            free = [token for token in draft.others_ahead[at] if token not in chain.branches_at(at)]
            for token in free[:count]:
                if chain.window.depth - at > chain.depth:
                    kv = pool.fork(draft.kv, len(chain.tokens) + at)
                    branch = _Draft(chain, draft.seed, False, at, kv, [token], draft.grammar)
                    draft.branches[at, token] = branch
        return list(draft.branches.values())

    # --- on the model's thread; the event loop does not touch the drafts meanwhile ---

    def _grow(self, drafts: list[_Draft], interrupted: Callable[[], bool]) -> list[tuple[_Draft, Exception]]:
        """Forwards until the runs have their length, or a verdict waits; prompts are taken in chunks. What failed, and why."""
        failed: list[tuple[_Draft, Exception]] = []
        goals: dict[int, int] = {}

        def begin(draft: _Draft) -> None:
            draft.stuck = False
            self._begin_grammar(draft)
            goals[id(draft)] = draft.goal

        def wants_more(draft: _Draft) -> bool:
            return not draft.stuck and len(draft.run) < goals[id(draft)] and self._fits(draft)

        drafts = self._each(drafts, begin, failed)
        while active := [draft for draft in drafts if wants_more(draft)]:
            try:
                self._extend(active, goals)
            except torch.AcceleratorError:
                raise
            except Exception:  # noqa: BLE001  # raised again by whose fault it is
                # Nothing was changed; alone, those that it was not for go on.
                self._each(active, lambda draft: self._extend([draft], goals), failed)
                drafts = [draft for draft in drafts if all(draft is not other for other, _ in failed)]
            if interrupted():
                break
            # One chunk of prompts a round: who guesses already is not held up by more.
            drafts = [draft for draft in drafts if draft.run] or drafts
        return failed

    @staticmethod
    def _each(drafts: list[_Draft], work: Callable[[_Draft], None], failed: list[tuple[_Draft, Exception]]) -> list[_Draft]:
        """Do the work for each; those for which it raised nothing. The others are noted with what it raised."""
        well: list[_Draft] = []
        for draft in drafts:
            try:
                work(draft)
                well.append(draft)
            except torch.AcceleratorError:
                raise
            except Exception as error:  # noqa: BLE001  # logged when the sequence is given up
                failed.append((draft, error))
        return well

    def _extend(self, drafts: list[_Draft], goals: dict[int, int]) -> None:
        """The next token of each, or several by one call. If it raises, no draft has been changed."""
        if not self._go_on(drafts, min(goals[id(draft)] - len(draft.run) for draft in drafts)):
            self._forward(drafts)

    def _go_on(self, drafts: list[_Draft], count: int) -> bool:
        """The next `count` tokens of all by one call, where nothing but the likeliest is asked for, and nothing besides it."""
        if self._runner.decoder is None or len(drafts) > self._max_batch_tokens:
            return False
        if not all(draft.plain and draft.kv.length + 1 == draft.length for draft in drafts):
            return False
        if not all(draft.length + count <= self._runner.context_length for draft in drafts):
            return False
        if not all(self._pool.reserve(draft.kv, draft.length + count - 1) for draft in drafts):
            return False
        slices = [Slice(draft.unread(1), draft.kv.length, draft.kv.pages, 1) for draft in drafts]
        rows = self._runner.continue_greedily(slices, count, self._vocab_size)
        if rows is None:
            return False
        for draft, tokens in zip(drafts, zip(*rows, strict=True), strict=True):
            draft.kv.length += count
            draft.run += tokens
            draft.others += [[]] * count
            self._pool.publish(draft.kv, draft.chain.tokens, draft.chain.opened.tenant)
        return True

    def _begin_grammar(self, draft: _Draft) -> None:
        """Here rather than on the event loop, since it can take a while; the verifier has compiled the same before."""
        wanted = draft.chain.opened.grammar
        if wanted is None or draft.grammar is not None or draft.at is not None or self._grammars is None:
            return
        try:
            matcher = self._grammars.compile(wanted).matcher()
        except OutriderError as error:
            log.warning("sequence %d is drafted without its grammar: %s", draft.chain.opened.sequence_id, error)
            matcher = None
        draft.grammar = FollowedGrammar(matcher, self._grammars.mask_width)

    def _fits(self, draft: _Draft) -> bool:
        """Reserve pages for all the text there is."""
        return draft.length < self._runner.context_length and self._pool.reserve(draft.kv, draft.length)

    def _forward(self, drafts: list[_Draft]) -> None:
        budget = self._max_batch_tokens
        slices: list[Slice] = []
        scored: list[_Draft] = []
        fed: list[_Draft] = []
        # Whoever lacks one token goes before prompts.
        for draft in sorted(drafts, key=lambda d: d.length - d.kv.length):
            tokens = draft.unread(budget)
            if not tokens:
                break
            complete = draft.kv.length + len(tokens) == draft.length
            slices.append(Slice(tokens, draft.kv.length, draft.kv.pages, int(complete)))
            fed.append(draft)
            if complete:
                scored.append(draft)
            budget -= len(tokens)
        logits_RV = self._runner.forward(slices)[:, : self._vocab_size]
        guesses = self._choose(scored, logits_RV) if scored else []
        # From here on nothing should fail, since drafts are changed.
        for draft, part in zip(fed, slices, strict=True):
            draft.kv.length += len(part.token_ids)
        for draft, guess in zip(scored, guesses, strict=True):
            _append(draft, guess)
        for draft in fed:
            self._pool.publish(draft.kv, draft.chain.tokens, draft.chain.opened.tenant)

    def _choose(self, drafts: list[_Draft], logits_RV: torch.Tensor) -> list[_Guess | None]:
        """Each row's next token: the likeliest, or one that was drawn as its sequence asks for; None where nothing may follow."""
        logits_RV = adjust(logits_RV, [_context(draft) for draft in drafts])
        top = logits_RV.topk(min(1 + _ALTERNATIVES, logits_RV.shape[-1]))
        # Grammar and bans together may leave nothing, and a model may overflow.
        possible = top.values[:, 0].isfinite().tolist()
        guesses: list[_Guess | None] = [
            _Guess(likeliest[0], likeliest) if possible[i] else None for i, likeliest in enumerate(top.indices.tolist())
        ]
        for rule, sample in ((Rule.SPARSE, self._sample), (Rule.COUPLED, self._sample_coupled)):
            rows = [i for i, draft in enumerate(drafts) if draft.rule is rule and possible[i]]
            if rows:
                drawn = sample([drafts[i] for i in rows], logits_RV[rows])
                for i, (token, distribution) in zip(rows, drawn, strict=True):
                    guesses[i] = _Guess(token, top.indices[i].tolist(), distribution)
        return guesses

    def _sample_coupled(self, drafts: list[_Draft], logits_RV: torch.Tensor) -> list[tuple[int, SparseDistribution | None]]:
        """Draw with the verifier's own noise, so that close models draw the same tokens; ids alone cross the wire."""
        probs_RV = target_probs(logits_RV, [draft.chain.opened.sampling for draft in drafts])
        keys = coupled_keys([draft.seed for draft in drafts], [draft.length for draft in drafts])
        return [(token, None) for token in coupled_sample(probs_RV, on(probs_RV.device, keys)).tolist()]

    def _sample(self, drafts: list[_Draft], logits_RV: torch.Tensor) -> list[tuple[int, SparseDistribution | None]]:
        """Truncate to the likeliest few, round to the wire's float32, and draw from exactly that."""
        probs_RV = target_probs(logits_RV, [draft.chain.opened.sampling for draft in drafts])
        top_RE, ids_RE = probs_RV.topk(min(self._max_entries, probs_RV.shape[-1]), dim=-1)
        top_RE = (top_RE / top_RE.sum(-1, keepdim=True)).float()
        # Nothing is drawn twice with one number: a token that was drafted and fell has had a say in what came of the others.
        draws = [draft.draw_count for draft in drafts]
        numbers = uniforms([draft.seed for draft in drafts], [draft.length for draft in drafts], Purpose.DRAFT, draws)
        picks = inverse_cdf(top_RE, on(top_RE.device, numbers))
        tokens = ids_RE.gather(-1, picks.unsqueeze(-1)).squeeze(-1).tolist()
        ids, weights = ids_RE.cpu().numpy(), top_RE.cpu().numpy().astype(np.float64)
        kept = weights > 0
        return [(tokens[i], SparseDistribution(ids[i][kept[i]], weights[i][kept[i]])) for i in range(len(drafts))]


def _append(draft: _Draft, guess: _Guess | None) -> None:
    """Take over what was chosen to follow a draft."""
    if guess is None:
        draft.stuck = True
        # The last token is read again when the next guess is asked for.
        draft.kv.length -= 1
        return
    draft.run.append(guess.token)
    if guess.distribution is not None:
        draft.draw_count += 1
        draft.distributions.append(guess.distribution)
    if draft.at is None:
        draft.others.append([token for token in guess.likeliest if token != guess.token])


def _context(draft: _Draft) -> Context:
    """What bias, penalties and grammar look at."""
    opened = draft.chain.opened
    if not opened.sampling.penalised and draft.grammar is None:
        return Context(opened.sampling)
    text = [*draft.chain.tokens, *draft.guessed]
    mask = draft.grammar.mask(text[opened.prompt_length :]) if draft.grammar is not None else None
    return Context(opened.sampling, text, opened.prompt_length, mask=mask)
