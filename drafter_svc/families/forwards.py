"""The draft model's forwards, which guess the next token of all sequences at once.

`DraftModel` calls `begin`, `wanting` and `grow` on the model's thread, and `fits` on the event
loop. `wanting` calls `fits` too.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, takewhile
from typing import Any

import numpy as np
import torch

from drafter_svc.families.cached_draft import CachedDraft, Guess
from drafter_svc.families.shared_pages import SharedPagePool
from drafter_svc.families.vocabulary import Vocabulary
from drafter_svc.grammar_state import GrammarState
from outrider.grammar.compiler import GrammarCompiler
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.messages import DraftDistribution
from outrider.sampling.context import Context
from outrider.sampling.logits import adjust
from outrider.sampling.noise import Purpose, coupled_keys, uniforms
from outrider.sampling.sampler import coupled_sample, coupled_top, inverse_cdf, target_probs
from outrider.sampling.tensors import fetch, on

# The number of alternative tokens that are kept for each guessed token, without and with trees.
_ALTERNATIVES = 3
_TREE_ALTERNATIVES = 7
# The maximum number of unread tokens of a sequence that is past its prompt: the token that the
# verifier committed, and the last guess.
_FEW_TOKENS = 2

DEVICE_LOST = torch.AcceleratorError
"""The exception after a failure of a device, which this process cannot use again."""


class Forwards:
    """Runs the loaded model over the pages of its KV cache. DraftModel explains the parameters."""

    def __init__(
        self,
        runner: ModelRunner,
        pool: SharedPagePool,
        max_batch_tokens: int,
        max_entries: int,
        grammars: GrammarCompiler | None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._runner = runner
        self._vocabulary = vocabulary
        self._columns = None if vocabulary is None else Columns(vocabulary, runner.device)
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._max_entries = max_entries
        self._grammars = grammars

    def begin(self, drafts: list[CachedDraft]) -> None:
        """Start a round for these drafts: set their goals, and compile new grammars."""
        for draft in drafts:
            draft.begin()
            self._begin_text(draft)
            if draft.grammar is None and draft.at is None:
                draft.grammar = GrammarState.of(draft.sequence, self._grammars)

    def wanting(self, drafts: list[CachedDraft]) -> list[CachedDraft]:
        """Reserve pages for the drafts that should still grow; return the drafts that got pages."""
        return [draft for draft in drafts if self._wants_more(draft)]

    def grow(self, drafts: list[CachedDraft]) -> None:
        """Guess the next token of each draft; all drafts must come from `wanting`.

        A draft that has not read its whole prompt reads the prompt's next chunk instead. Prompts
        are read in the order of the drafts. If one forward of a PARD model, or one call of the C
        decoder or of CUDA graphs, can guess several tokens for every draft, then it is used. A
        forward that raises has changed no draft.
        """
        if self._guess_parallel(drafts):
            return
        fewest = min(draft.goal - draft.guess_count for draft in drafts)
        if not self._guess_several(drafts, fewest):
            self._forward(drafts)

    def fits(self, draft: CachedDraft) -> bool:
        """Reserve pages for all tokens of a draft; return False if there are too few.

        Also return False if the model's context has no room for another token, or if the text has
        no tokens in the vocabulary of a draft model with another tokenizer.
        """
        if not 0 < draft.length < self._runner.context_length:
            return False
        return self._pool.reserve(draft.kv, draft.length)

    def _wants_more(self, draft: CachedDraft) -> bool:
        return not draft.stuck and draft.guess_count < draft.goal and self.fits(draft)

    def _begin_text(self, draft: CachedDraft) -> None:
        """Encode a text for a draft model with another vocabulary; share a known prefix's pages.

        The method runs on the model's thread, because a long prompt takes long: 10 µs a token.
        """
        if self._vocabulary is not None and draft.own_text is None:
            draft.own_text = self._vocabulary.begin(draft.sequence.tokens)
            self._pool.match_prefix(draft.kv, draft.committed, draft.sequence.opened.tenant)

    def _guess_parallel(self, drafts: list[CachedDraft]) -> bool:
        """Guess all wanted tokens with one forward of a PARD model (arXiv 2504.18583).

        Mask tokens, in place of the tokens not guessed yet, follow each sequence; each of them
        predicts the token after it. Their keys and values are not kept. Guesses nothing and returns
        False if the model is no PARD model, if a draft's guesses depend on the guesses before them,
        if one forward has no room for all these tokens, or if a draft lacks pages or context.
        """
        unknown = self._runner.parallel_token_id
        if unknown is None or not all(_is_independent(draft) for draft in drafts):
            return False
        counts = [draft.goal - draft.guess_count for draft in drafts]
        lengths = [d.unread_count + n - 1 for d, n in zip(drafts, counts, strict=True)]
        if sum(lengths) > self._max_batch_tokens:
            return False
        for draft, count in zip(drafts, counts, strict=True):
            end = draft.length + count - 1
            if end >= self._runner.context_length or not self._pool.reserve(draft.kv, end):
                return False
        slices = []
        for draft, count in zip(drafts, counts, strict=True):
            tokens = [*draft.unread(draft.unread_count), *[unknown] * (count - 1)]
            kv = draft.kv
            slices.append(SequenceSlice(tokens, kv.num_computed_tokens, kv.pages, count, kv=kv))
        logits_RV = self._forward_logits(slices)
        rows = [draft for draft, n in zip(drafts, counts, strict=True) for _ in range(n)]
        places = [d.place + i for d, n in zip(drafts, counts, strict=True) for i in range(n)]
        guesses = self._choose(rows, _mask_unknown(rows, logits_RV), places)
        for draft, count, end in zip(drafts, counts, accumulate(counts), strict=True):
            draft.kv.num_computed_tokens = draft.length
            found = [each for each in takewhile(bool, guesses[end - count : end]) if each]
            if len(found) < count:
                draft.stuck = True
                # Read the last token again when another guess is wanted.
                draft.kv.num_computed_tokens -= not found
            draft.extend(found)
            self._cache_pages(draft)
        return True

    def _guess_several(self, drafts: list[CachedDraft], count: int) -> bool:
        """Guess the next `count` tokens of all drafts in one call, with one wait for a GPU.

        Guesses nothing and returns False if one call cannot guess several tokens. This is so, for
        example, if a draft samples, branches, has a grammar, lacks more than one token in its KV
        cache, or has no room for `count` more tokens.
        """
        if not self._runner.continues or len(drafts) > self._max_batch_tokens:
            return False
        if not all(_is_plain(draft) and draft.unread_count == 1 for draft in drafts):
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
        for draft, guesses in zip(drafts, rows, strict=True):
            draft.kv.num_computed_tokens += len(guesses)
            draft.extend(guesses)
            self._cache_pages(draft)
        return True

    def _continue(self, drafts: list[CachedDraft], count: int) -> list[list[Guess]] | None:
        """Return the next guesses of each draft, at most `count`.

        Return None if one call cannot find them. All drafts have the same `vocab_size` and lack one
        token in their KV cache. A draft has fewer guesses where the model goes on with a token that
        the target lacks.
        """
        slices = [
            SequenceSlice(
                draft.unread(1), draft.kv.num_computed_tokens, draft.kv.pages, 1, kv=draft.kv
            )
            for draft in drafts
        ]
        limit = drafts[0].vocab_size
        trees = _want_trees(drafts)
        if self._columns is None and not trees:
            rows = self._runner.continue_greedily(slices, count, limit)
            if rows is None:
                return None
            return [[Guess(token, []) for token in tokens] for tokens in zip(*rows, strict=True)]
        own_limit = limit if self._columns is None else self._runner.vocab_size
        found = self._runner.continue_with_logits(slices, count, own_limit)
        if found is None:
            return None
        tokens_KB, logits_KBV = found
        logits_RV = self._of_target(logits_KBV.flatten(0, 1))[:, :limit]
        best, shares, own = _fetch(*_best(logits_RV, trees=trees), tokens_KB.flatten())
        tokens = own if self._columns is None else [ids[0] for ids in best]
        guesses = [
            Guess(token, best[i], shares=shares[i] or None) for i, token in enumerate(tokens)
        ]
        number = len(drafts)
        if self._columns is None:
            return [guesses[i::number] for i in range(number)]
        return [self._columns.agreed(guesses[i::number], own[i::number]) for i in range(number)]

    def _forward(self, drafts: list[CachedDraft]) -> None:
        """Guess the next token of each draft, or read a chunk of its prompt, in one forward."""
        budget = self._max_batch_tokens
        slices: list[SequenceSlice] = []
        scored: list[CachedDraft] = []
        fed: list[CachedDraft] = []
        # Drafts that are past their prompts go first.
        for draft in sorted(drafts, key=lambda draft: draft.unread_count > _FEW_TOKENS):
            tokens = draft.unread(budget)
            if not tokens:
                break
            complete = draft.kv.num_computed_tokens + len(tokens) == draft.length
            kv = draft.kv
            start = kv.num_computed_tokens
            slices.append(SequenceSlice(tokens, start, kv.pages, int(complete), kv=kv))
            fed.append(draft)
            if complete:
                scored.append(draft)
            budget -= len(tokens)
        guesses = self._score(slices, scored)
        # From here on drafts change, so nothing may fail.
        for draft, part in zip(fed, slices, strict=True):
            draft.kv.num_computed_tokens += len(part.token_ids)
        for draft, guess in zip(scored, guesses, strict=True):
            if guess is not None:
                draft.extend([guess])
            else:
                draft.stuck = True
                # Read the last token again when another guess is wanted.
                draft.kv.num_computed_tokens -= 1
        for draft in fed:
            self._cache_pages(draft)

    def _score(self, slices: list[SequenceSlice], scored: list[CachedDraft]) -> list[Guess | None]:
        """Run a forward; return the guesses of `_choose` for the drafts of `scored`.

        The slices of `scored` have one row of logits each, in the same order; other slices have no
        rows.
        """
        logits_RV = self._forward_logits(slices)
        if not scored:
            return []
        places = [draft.place for draft in scored]
        return self._choose(scored, _mask_unknown(scored, logits_RV), places)

    def _forward_logits(self, slices: list[SequenceSlice]) -> torch.Tensor:
        return self._of_target(self._runner.forward(slices))

    def _of_target(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] of the target's tokens.

        If the model has the target's vocabulary, these are the model's own logits.
        """
        return logits_RV if self._columns is None else self._columns.pick(logits_RV)

    def _cache_pages(self, draft: CachedDraft) -> None:
        self._pool.cache_pages(draft.kv, draft.committed, draft.sequence.opened.tenant)

    def _choose(
        self, drafts: list[CachedDraft], logits_RV: torch.Tensor, places: list[int]
    ) -> list[Guess | None]:
        """Choose a token from each row of logits; None where no token may follow.

        `drafts` has the draft of each row, and `places` the position of each token. Take the
        likeliest token, or draw a token if the draft's `distribution` says so.
        """
        logits_RV = adjust(logits_RV, [_context(draft) for draft in drafts])
        best_RK, shares_RK = _best(logits_RV, trees=_want_trees(drafts))
        # Grammar and bans together may forbid every token, and a model's logits may overflow.
        is_finite_R = logits_RV.gather(-1, best_RK[:, :1])[:, 0].isfinite()
        best, shares, possible = _fetch(best_RK, shares_RK, is_finite_R)
        guesses: list[Guess | None] = [None] * len(drafts)
        for i, ids in enumerate(best):
            if possible[i]:
                guesses[i] = Guess(ids[0], ids, shares=shares[i] or None)
        samplers = {
            DraftDistribution.SPARSE: self._sample,
            DraftDistribution.COUPLED: self._sample_coupled,
        }
        for kind, sample in samplers.items():
            rows = [i for i, d in enumerate(drafts) if d.distribution is kind and possible[i]]
            if not rows:
                continue
            drawn = sample(
                [drafts[i] for i in rows],
                logits_RV.index_select(0, on(logits_RV.device, rows)),
                [best[i] for i in rows],
                [places[i] for i in rows],
            )
            for i, guess in zip(rows, drawn, strict=True):
                guesses[i] = guess
        return guesses

    def _sample_coupled(
        self,
        drafts: list[CachedDraft],
        logits_RV: torch.Tensor,
        likeliest: list[list[int]],
        places: list[int],
    ) -> list[Guess]:
        """Draw with the verifier's own noise, so that similar models draw the same tokens.

        Only ids cross the wire, so there are no distributions. The target draws with this noise as
        well. If the target draws another token, that token is usually one of those that come next
        in the order of this draw. So where trees are verified, these tokens are the alternatives.
        """
        probs_RV = target_probs(logits_RV, [draft.sequence.opened.sampling for draft in drafts])
        keys = coupled_keys([draft.seed for draft in drafts], places)
        keys_R = on(probs_RV.device, keys)
        if _want_trees(drafts):
            ids_RK, shares_RK = coupled_top(probs_RV, keys_R, 1 + _TREE_ALTERNATIVES)
            best, shares = _fetch(ids_RK, shares_RK)
            return [Guess(ids[0], ids, shares=of) for ids, of in zip(best, shares, strict=True)]
        tokens = coupled_sample(probs_RV, keys_R).tolist()
        return [Guess(token, ids) for token, ids in zip(tokens, likeliest, strict=True)]

    def _sample(
        self,
        drafts: list[CachedDraft],
        logits_RV: torch.Tensor,
        likeliest: list[list[int]],
        places: list[int],
    ) -> list[Guess]:
        """Draw from the `max_entries` likeliest tokens, with probabilities rounded to float32.

        The verifier gets exactly the distribution that was drawn from: it is truncated, normalised
        and rounded before the draw (docs/losslessness.md).
        """
        probs_RV = target_probs(logits_RV, [draft.sequence.opened.sampling for draft in drafts])
        top_RE, ids_RE = probs_RV.topk(min(self._max_entries, probs_RV.shape[-1]), dim=-1)
        top_RE = (top_RE / top_RE.sum(-1, keepdim=True)).float()
        # Each draw uses a new random number. If a token was rejected, the number that drew it has
        # influenced which tokens were committed since, so another draw with this number would be
        # biased.
        seeds = [draft.seed for draft in drafts]
        draws = [draft.draw_count for draft in drafts]
        numbers = uniforms(seeds, places, Purpose.DRAFT, draws)
        picks = inverse_cdf(top_RE, on(top_RE.device, numbers))
        tokens_R = ids_RE.gather(-1, picks.unsqueeze(-1)).squeeze(-1)
        tokens, ids, top = fetch([tokens_R, ids_RE, top_RE])
        draft_probs = top.astype(np.float64)
        kept = draft_probs > 0
        return [
            Guess(
                int(tokens[i]),
                likeliest[i],
                SparseDistribution(ids[i][kept[i]], draft_probs[i][kept[i]]),
            )
            for i in range(len(drafts))
        ]


class Columns:
    """Picks the target's tokens from the logits of a draft model with another vocabulary."""

    def __init__(self, vocabulary: Vocabulary, device: torch.device) -> None:
        self._own_of = vocabulary.own_of
        own = torch.from_numpy(vocabulary.own_of)
        self._indices = own.clamp(min=0).to(device)
        self._missing = (own < 0).to(device)

    def pick(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] of the target's tokens; -inf for those that the model lacks."""
        picked = logits_RV.index_select(-1, self._indices)
        return picked.masked_fill_(self._missing, float("-inf"))

    def agreed(self, guesses: list[Guess], own: list[int]) -> list[Guess]:
        """Return the guesses up to and including the first that is not the model's next token."""
        goes_on = [self._own_of[guess.token] == i for guess, i in zip(guesses, own, strict=True)]
        return guesses[: goes_on.index(False) + 1] if False in goes_on else guesses


def _want_trees(drafts: list[CachedDraft]) -> bool:
    """Return whether at least one draft should have branches for its verifier's next step."""
    return any(draft.sequence.wants_tree for draft in drafts)


def _best(logits_RV: torch.Tensor, *, trees: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest tokens of each row, the best first, and their probabilities.

    Without `trees` the probabilities are empty, [R, 0].
    """
    count = 1 + (_TREE_ALTERNATIVES if trees else _ALTERNATIVES)
    top = logits_RV.topk(min(count, logits_RV.shape[-1]))
    if not trees:
        return top.indices, top.values[:, :0]
    return top.indices, (top.values - logits_RV.logsumexp(-1, keepdim=True)).exp()


def _fetch(*tensors: torch.Tensor) -> Iterator[Any]:
    """Return the tensors' numbers as lists, after one wait for the device."""
    return (array.tolist() for array in fetch(tensors))


def _mask_unknown(drafts: list[CachedDraft], logits_RV: torch.Tensor) -> torch.Tensor:
    """Set to -inf the logits of ids that a draft's target does not know, or leave these ids out."""
    logits_RV = logits_RV[:, : max(draft.vocab_size for draft in drafts)]
    narrow = [i for i, draft in enumerate(drafts) if draft.vocab_size < logits_RV.shape[-1]]
    if narrow:
        logits_RV = logits_RV.clone()
    for i in narrow:
        logits_RV[i, drafts[i].vocab_size :] = float("-inf")
    return logits_RV


def _is_independent(draft: CachedDraft) -> bool:
    """Return whether each guess of a draft can be chosen without knowing the guesses before it.

    Penalties and a grammar depend on the guesses before. A SPARSE draft counts its draws one by
    one.
    """
    sampling = draft.sequence.opened.sampling
    if sampling.penalised or draft.grammar is not None:
        return False
    return draft.distribution is not DraftDistribution.SPARSE


def _is_plain(draft: CachedDraft) -> bool:
    """Return whether the model's likeliest token is all that the draft needs at each position.

    A grammar, bias or penalties change which token is likeliest. Branches, which are prepared where
    the verifier lets a drafter run ahead, need the alternatives.
    """
    sequence = draft.sequence
    if draft.at is not None or sequence.window.depth > sequence.draft_tokens:
        return False
    if draft.grammar is not None or draft.distribution is not DraftDistribution.ONE_HOT:
        return False
    return Context(sequence.opened.sampling).plain


def _context(draft: CachedDraft) -> Context:
    """Return the settings, tokens and mask by which a draft's logits are adjusted."""
    opened = draft.sequence.opened
    if not opened.sampling.penalised and draft.grammar is None:
        return Context(opened.sampling)
    text = [*draft.sequence.tokens, *draft.guessed]
    mask = None
    if draft.grammar is not None:
        mask = draft.grammar.mask(text[opened.prompt_length :])
    return Context(opened.sampling, text, opened.prompt_length, mask=mask)
