"""The draft model's forwards: one guessed token each, for all sequences at once; runs on the thread that the model lives on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from drafter_svc.families.cached_draft import CachedDraft
from drafter_svc.families.shared_pages import SharedPagePool
from drafter_svc.followed_grammar import FollowedGrammar
from outrider.errors import OutriderError
from outrider.grammar.compiler import GrammarCompiler
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.messages import DraftDistribution, SparseDistribution
from outrider.sampling.logits import Context, adjust
from outrider.sampling.noise import Purpose, coupled_keys, uniforms
from outrider.sampling.sampler import coupled_sample, inverse_cdf, target_probs
from outrider.sampling.tensors import on

log = logging.getLogger(__name__)

# Other tokens that are remembered for each guessed one.
_ALTERNATIVES = 3
# What a sequence lacks that is past its prompt: the token that the verifier drew, and at most its own last guess besides.
_FEW_TOKENS = 2

DEVICE_LOST = torch.AcceleratorError
"""A device that failed does nothing more for this process."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A token, the likeliest ones at its place, and what it was sampled from (None if it was not)."""

    token: int
    likeliest: list[int]
    distribution: SparseDistribution | None = None


class Forwards:
    """The loaded model with the pages of its cache; see DraftModel for the parameters."""

    def __init__(
        self,
        runner: ModelRunner,
        pool: SharedPagePool,
        max_batch_tokens: int,
        max_entries: int,
        grammars: GrammarCompiler | None,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._max_entries = max_entries
        self._grammars = grammars

    def begin(self, drafts: list[CachedDraft]) -> None:
        """Set out for what is wanted of these drafts now."""
        for draft in drafts:
            draft.begin()
            self._begin_grammar(draft)

    def wanting(self, drafts: list[CachedDraft]) -> list[CachedDraft]:
        """Those of these drafts that want more, and for which there are pages."""
        return [draft for draft in drafts if self._wants_more(draft)]

    def grow(self, drafts: list[CachedDraft]) -> None:
        """One more token for each of these drafts that want more, or several if one call gives them; of prompts a chunk.

        Prompts are taken in the order of the drafts. A forward that raises has changed nothing.
        """
        if not self._guess_several(drafts, min(draft.goal - draft.guess_count for draft in drafts)):
            self._forward(drafts)

    def fits(self, draft: CachedDraft) -> bool:
        """Reserve pages for all the text there is; False if there are none, or at the end of the model's context."""
        return draft.length < self._runner.context_length and self._pool.reserve(
            draft.kv, draft.length
        )

    def _wants_more(self, draft: CachedDraft) -> bool:
        return not draft.stuck and draft.guess_count < draft.goal and self.fits(draft)

    def _begin_grammar(self, draft: CachedDraft) -> None:
        """Here rather than on the event loop, since it can take a while; the verifier has compiled the same before."""
        wanted = draft.sequence.opened.grammar
        if (
            wanted is None
            or draft.grammar is not None
            or draft.at is not None
            or self._grammars is None
        ):
            return
        try:
            matcher = self._grammars.compile(wanted).matcher()
        except OutriderError as error:
            log.warning("sequence %d is drafted without its grammar: %s", draft.sequence.id, error)
            matcher = None
        draft.grammar = FollowedGrammar(matcher, self._grammars.mask_width)

    def _guess_several(self, drafts: list[CachedDraft], count: int) -> bool:
        """The next `count` tokens of all by one call, where nothing but the likeliest is asked for, and nothing besides it."""
        if self._runner.decoder is None or len(drafts) > self._max_batch_tokens:
            return False
        if not all(_is_plain(draft) and draft.kv.length + 1 == draft.length for draft in drafts):
            return False
        vocab_size = drafts[0].vocab_size
        if any(draft.vocab_size != vocab_size for draft in drafts):
            return False
        if not all(draft.length + count <= self._runner.context_length for draft in drafts):
            return False
        if not all(self._pool.reserve(draft.kv, draft.length + count - 1) for draft in drafts):
            return False
        rows = self._continue(drafts, count)
        if rows is None:
            return False
        for draft, tokens in zip(drafts, zip(*rows, strict=True), strict=True):
            draft.kv.length += count
            for token in tokens:
                draft.append(token, [])
            self._cache_pages(draft)
        return True

    def _continue(self, drafts: list[CachedDraft], count: int) -> list[list[int]] | None:
        """`count` rows of the likeliest next token of each draft, whose targets know the same ids; None where one call cannot."""
        slices = [
            SequenceSlice(draft.unread(1), draft.kv.length, draft.kv.pages, 1) for draft in drafts
        ]
        return self._runner.continue_greedily(slices, count, drafts[0].vocab_size)

    def _forward(self, drafts: list[CachedDraft]) -> None:
        """The next token of each, or a chunk of its prompt."""
        budget = self._max_batch_tokens
        slices: list[SequenceSlice] = []
        scored: list[CachedDraft] = []
        fed: list[CachedDraft] = []
        # Those that lack little go before prompts.
        for draft in sorted(drafts, key=lambda draft: draft.unread_count > _FEW_TOKENS):
            tokens = draft.unread(budget)
            if not tokens:
                break
            complete = draft.kv.length + len(tokens) == draft.length
            slices.append(SequenceSlice(tokens, draft.kv.length, draft.kv.pages, int(complete)))
            fed.append(draft)
            if complete:
                scored.append(draft)
            budget -= len(tokens)
        guesses = self._score(slices, scored)
        # From here on nothing should fail, since drafts are changed.
        for draft, part in zip(fed, slices, strict=True):
            draft.kv.length += len(part.token_ids)
        for draft, guess in zip(scored, guesses, strict=True):
            if guess is not None:
                draft.append(guess.token, guess.likeliest, guess.distribution)
            else:
                draft.stuck = True
                # The last token is read again when the next guess is asked for.
                draft.kv.length -= 1
        for draft in fed:
            self._cache_pages(draft)

    def _score(self, slices: list[SequenceSlice], scored: list[CachedDraft]) -> list[Guess | None]:
        """Run a forward; the next token of each draft of `scored`, whose slices have a row of logits."""
        logits_RV = self._runner.forward(slices)
        return self._choose(scored, _known_to_targets(scored, logits_RV)) if scored else []

    def _cache_pages(self, draft: CachedDraft) -> None:
        self._pool.cache_pages(draft.kv, draft.sequence.tokens, draft.sequence.opened.tenant)

    def _choose(self, drafts: list[CachedDraft], logits_RV: torch.Tensor) -> list[Guess | None]:
        """Each row's next token: the likeliest, or one that was drawn as its sequence asks for; None where nothing may follow."""
        logits_RV = adjust(logits_RV, [_context(draft) for draft in drafts])
        top = logits_RV.topk(min(1 + _ALTERNATIVES, logits_RV.shape[-1]))
        # Grammar and bans together may leave nothing, and a model may overflow.
        possible = top.values[:, 0].isfinite().tolist()
        guesses: list[Guess | None] = [
            Guess(likeliest[0], likeliest) if possible[i] else None
            for i, likeliest in enumerate(top.indices.tolist())
        ]
        samplers = {
            DraftDistribution.SPARSE: self._sample,
            DraftDistribution.COUPLED: self._sample_coupled,
        }
        for kind, sample in samplers.items():
            rows = [i for i, d in enumerate(drafts) if d.distribution is kind and possible[i]]
            if not rows:
                continue
            drawn = sample([drafts[i] for i in rows], logits_RV[rows])
            for i, (token, distribution) in zip(rows, drawn, strict=True):
                guesses[i] = Guess(token, top.indices[i].tolist(), distribution)
        return guesses

    def _sample_coupled(
        self, drafts: list[CachedDraft], logits_RV: torch.Tensor
    ) -> list[tuple[int, SparseDistribution | None]]:
        """Draw with the verifier's own noise, so that close models draw the same tokens; ids alone cross the wire."""
        probs_RV = target_probs(logits_RV, [draft.sequence.opened.sampling for draft in drafts])
        keys = coupled_keys([draft.seed for draft in drafts], [draft.length for draft in drafts])
        return [
            (token, None) for token in coupled_sample(probs_RV, on(probs_RV.device, keys)).tolist()
        ]

    def _sample(
        self, drafts: list[CachedDraft], logits_RV: torch.Tensor
    ) -> list[tuple[int, SparseDistribution | None]]:
        """Truncate to the likeliest few, round to the wire's float32, and draw from exactly that."""
        probs_RV = target_probs(logits_RV, [draft.sequence.opened.sampling for draft in drafts])
        top_RE, ids_RE = probs_RV.topk(min(self._max_entries, probs_RV.shape[-1]), dim=-1)
        top_RE = (top_RE / top_RE.sum(-1, keepdim=True)).float()
        # Nothing is drawn twice with one number: a token that was drafted and fell has had a say in what came of the others.
        draws = [draft.draw_count for draft in drafts]
        numbers = uniforms(
            [draft.seed for draft in drafts],
            [draft.length for draft in drafts],
            Purpose.DRAFT,
            draws,
        )
        picks = inverse_cdf(top_RE, on(top_RE.device, numbers))
        tokens = ids_RE.gather(-1, picks.unsqueeze(-1)).squeeze(-1).tolist()
        ids, weights = ids_RE.cpu().numpy(), top_RE.cpu().numpy().astype(np.float64)
        kept = weights > 0
        return [
            (tokens[i], SparseDistribution(ids[i][kept[i]], weights[i][kept[i]]))
            for i in range(len(drafts))
        ]


def _known_to_targets(drafts: list[CachedDraft], logits_RV: torch.Tensor) -> torch.Tensor:
    """The logits of the ids that each draft's target knows; those of others are -inf or left out."""
    logits_RV = logits_RV[:, : max(draft.vocab_size for draft in drafts)]
    narrow = [i for i, draft in enumerate(drafts) if draft.vocab_size < logits_RV.shape[-1]]
    if narrow:
        logits_RV = logits_RV.clone()
    for i in narrow:
        logits_RV[i, drafts[i].vocab_size :] = float("-inf")
    return logits_RV


def _is_plain(draft: CachedDraft) -> bool:
    """Whether the likeliest token is all that is wanted: greedy, nothing to bend the choice, no branches to prepare."""
    sequence = draft.sequence
    if (
        draft.at is not None
        or sequence.window.depth > sequence.draft_tokens
        or draft.grammar is not None
    ):
        return False
    return (
        draft.distribution is DraftDistribution.ONE_HOT and Context(sequence.opened.sampling).plain
    )


def _context(draft: CachedDraft) -> Context:
    """What bias, penalties and grammar look at."""
    opened = draft.sequence.opened
    if not opened.sampling.penalised and draft.grammar is None:
        return Context(opened.sampling)
    text = [*draft.sequence.tokens, *draft.guessed]
    mask = draft.grammar.mask(text[opened.prompt_length :]) if draft.grammar is not None else None
    return Context(opened.sampling, text, opened.prompt_length, mask=mask)
