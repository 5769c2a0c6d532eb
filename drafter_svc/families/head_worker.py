"""The head that a process uses for all its verifiers, and the thread on which it runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

import torch

from drafter_svc.grammar_state import GrammarState
from outrider.drafter.draft_sequence import DraftSequence
from outrider.drafter.step_queue import MAX_FEATURE_BYTES
from outrider.heads.loading import load, target_weights
from outrider.heads.model import (
    Branch,
    Extension,
    HeadModel,
    HeadProposal,
    HeadSequence,
    NoPages,
    Place,
    Rank,
)
from outrider.heads.reading import read, read_target_config, with_reading
from outrider.heads.reading_choice import choose_reading, described
from outrider.heads.spec import Decoder, HeadSpec
from outrider.lm.cpu.weights import dtype_for_int8, fastest_dtype, int8_is_faster
from outrider.lm.devices import find_device
from outrider.lm.streams import SharedRows, use_own_stream
from outrider.protocol.draft_messages import FeatureDtype, FeatureRequest, FeatureRows
from outrider.protocol.messages import DraftDistribution
from outrider.sampling.context import Context
from outrider.sampling.logits import adjust
from outrider.sampling.noise import coupled_keys
from outrider.sampling.sampler import coupled_top, target_probs
from outrider.sampling.tensors import on
from outrider.tokenizer import end_token_ids

if TYPE_CHECKING:
    from outrider.grammar.compiler import GrammarCompiler

log = logging.getLogger(__name__)

_PAGE_SIZE = 16
_CACHE_BYTES = 2**30
_FULL_CONTEXTS = 64
# The number of tokens that are offered at each place of a draft, where trees are verified.
_TREE_WIDTH = 8
# The lowest confidence that may be sent: it must be above 0.
_LEAST_SHARE = 1e-6


@dataclass(frozen=True, slots=True)
class News:
    """An update of a sequence: committed tokens, and features of consecutive tokens."""

    tokens: list[int]
    first_position: int
    features: Sequence[SharedRows]

    @property
    def nbytes(self) -> int:
        """The size of the features in bytes."""
        return sum(rows.nbytes for rows in self.features)


@dataclass(frozen=True, slots=True)
class Offer:
    """Guesses for one sequence, with the other likely tokens at the place of each guess.

    `deeper` has the runs that go on after one of these other tokens.
    """

    tokens: list[int]
    confidences: list[float]
    alternatives: list[list[tuple[int, float]]]
    deeper: Sequence[Branch]


@dataclass(eq=False, slots=True)
class HeadDraft:
    """A sequence, and the tokens and features that the head has not read yet.

    Only the head's thread uses the fields `read` and `grammar`.
    """

    sequence: DraftSequence
    seed: int
    width: int
    dtype: torch.dtype
    projected: bool
    """True if the head's projection has been applied to the features."""
    told: int = 0
    """The number of committed tokens that the head's thread was told of."""
    kept: list[tuple[int, SharedRows]] = field(default_factory=list)
    """Features that the head's thread was not told of yet, each with its first token's position."""
    read: HeadSequence | None = None
    reading: Future[None] | None = None
    """The work of the last call of `HeadWorker.read`, until the next draft has checked it."""
    failed: bool = False
    """True if a forward failed, so that the head has to be told of the whole text again."""
    grammar: GrammarState | None = None
    """The state of the request's grammar."""

    def keep(self, first_position: int, rows: FeatureRows) -> int:
        """Keep features; return the position after the last of them."""
        if isinstance(rows, bytes):
            read = torch.frombuffer(bytearray(rows), dtype=self.dtype).reshape(-1, self.width)
            rows = SharedRows.of(read)
        self.kept.append((first_position, rows))
        return first_position + len(rows)

    def take_news(self) -> News:
        """Take what the head's thread was not told of yet: committed tokens, and kept features.

        Features of the last committed token, and of later tokens, stay kept. Features before a gap
        are useless and are left out.
        """
        tokens = self.sequence.tokens
        most = len(tokens) - 1
        kept, self.kept = self.kept, []
        first: int = 0
        parts: list[SharedRows] = []
        end = -1
        for position, rows in kept:
            fits = max(0, most - position)
            if fits < len(rows):
                self.kept.append((position + fits, rows[fits:]))
            if fits == 0:
                continue
            if position != end:
                first, parts = position, []
            parts.append(rows[:fits])
            end = position + min(fits, len(rows))
        if self.failed:
            self.failed, self.told = False, 0
        news = News(tokens[self.told :], first, parts)
        self.told = len(tokens)
        return news


class HeadWorker:
    """A loaded head. The event loop calls its methods, and they hand work to the head's thread.

    Only `load` and `choose_reading` are called on other threads, as they say.
    """

    fatal = (torch.AcceleratorError,)

    def __init__(
        self,
        model: HeadModel,
        thread: ThreadPoolExecutor,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """With `grammars`, the head guesses no token that a request's grammar forbids."""
        self.device = model.device
        self._model = model
        self._thread = thread
        self._grammars = grammars
        # How many bytes of features the thread was given to read, and how many it has read.
        self._given_bytes = 0
        self._read_bytes = 0

    @classmethod
    def load(
        cls,
        thread: ThreadPoolExecutor,
        *,
        head: str,
        target: str,
        layers: tuple[int, ...],
        dtype: str,
        int8: bool | None = False,
        device: str,
        page_count: int | None,
        threads: int | None,
        reading: int | None = None,
        trust_remote_code: bool = False,
    ) -> HeadWorker:
        """Load the head; `thread` calls this. Raises OutriderError(INVALID_VALUE) with the reason.

        The `dtype` "auto" means bfloat16, or float32 on a CPU without our kernels for bfloat16.
        `int8` is as for `outrider.lm.runner.ModelRunner.load`.
        """
        from outrider.grammar.compiler import GrammarCompiler

        if threads is not None:
            torch.set_num_threads(threads)
        place = find_device(device)
        use_own_stream(place)
        if int8:
            dtype = dtype_for_int8(dtype, place)
        config = read_target_config(target, trust_remote_code)
        found = read(head, config, layers or None)
        options = found.spec.readings
        if reading is not None:
            found = with_reading(found, reading)
        elif len(options) > 1:
            text = "the head's file may mean something else, too (read as: %s): try check-head"
            log.info(text, described(options[0], options))
        numbers: torch.dtype
        if dtype == "auto":
            numbers = fastest_dtype() if place.type == "cpu" else torch.bfloat16
        else:
            numbers = getattr(torch, dtype)
        if int8 is None:
            int8 = place.type == "cpu" and numbers is torch.bfloat16 and int8_is_faster()
        model = load(
            found,
            target_weights(target),
            page_count=page_count or _page_count(found.spec, numbers),
            page_size=_PAGE_SIZE,
            dtype=numbers,
            int8=int8,
            device=place,
        )
        model.capture(_TREE_WIDTH)
        # The verifier has checked the grammars.
        vocab_size = found.spec.vocab_size
        ends = end_token_ids(target, vocab_size)
        grammars = GrammarCompiler(target, vocab_size, ends, trusted=True)
        return cls(model, thread, grammars)

    def choose_reading(
        self, text: Sequence[int], states: Mapping[int, torch.Tensor], answers: Sequence[int]
    ) -> None:
        """Choose the interpretation of the head's file that guesses a text best, and log it.

        For the arguments see `reading_choice`. Call this before the first sequence, on any thread
        except the head's. The method returns after the choice.
        """
        choice = self._thread.submit(choose_reading, self._model, text, states, answers).result()
        self._model.read_as(choice.spec)
        self._thread.submit(self._model.capture, _TREE_WIDTH).result()

    @property
    def spec(self) -> HeadSpec:
        """The description of the head's computation."""
        return self._model.spec

    @property
    def feature_request(self) -> FeatureRequest:
        """The request to the verifier for the target's states that the head reads."""
        model = self._model
        dtype = FeatureDtype[str(model.dtype).removeprefix("torch.").upper()]
        spec = model.spec
        return FeatureRequest(
            spec.aux_layers,
            spec.final_state,
            dtype,
            # A head without a cache drafts from the last feature alone.
            last_prompt_token_count=1 if spec.decoder is None else None,
            projection=model.projection_name,
        )

    def width(self, *, projected: bool) -> int:
        """Return how many numbers a feature has, before or after the head's projection."""
        return self._model.projected_width if projected else self.spec.feature_width

    def begin(self, sequence: DraftSequence, seed: int, *, projected: bool) -> HeadDraft:
        """Make a draft for a sequence; the head has read nothing of the sequence yet."""
        width = self.width(projected=projected)
        return HeadDraft(sequence, seed, width, self._model.dtype, projected)

    def read(self, draft: HeadDraft, news: News) -> None:
        """Let the head read features as soon as its thread is free.

        The next draft of the sequence raises the exception of a forward that failed. While too
        many features wait for the head's thread, the thread gets no more. The head then drafts from
        the features after the gap.
        """
        if self._given_bytes - self._read_bytes > MAX_FEATURE_BYTES:
            news = News(news.tokens, 0, [])
        self._given_bytes += news.nbytes
        draft.reading = self._thread.submit(self._read, draft, news)

    def close(self, draft: HeadDraft) -> None:
        """Free a draft's pages."""
        self._thread.submit(self._close, draft)

    def draft(
        self, drafts: Sequence[HeadDraft], wanted: Sequence[int], *, trees: bool
    ) -> Future[list[Offer | None]]:
        """Read the news of these drafts, and guess at most `wanted[i]` tokens for draft i.

        The future's list has None for each draft whose features did not all come. It has only None
        if there are too few pages. If a forward failed, the future has its exception.
        """
        news = [(draft, draft.take_news()) for draft in drafts]
        return self._thread.submit(self._draft, news, list(wanted), trees)

    # --- on the head's thread ---

    def _read(self, draft: HeadDraft, news: News) -> None:
        self._read_bytes += news.nbytes
        self._extend([(draft, news)])

    def _draft(
        self, news: list[tuple[HeadDraft, News]], wanted: list[int], trees: bool
    ) -> list[Offer | None]:
        try:
            for draft, _ in news:
                # The thread works in order, so earlier reads are done and `result` does not wait.
                reading, draft.reading = draft.reading, None
                if reading is not None:
                    reading.result()
        except Exception:  # the caller gets it from its future
            self._forget(news)
            raise
        self._extend(news)
        places = [i for i, (draft, _) in enumerate(news) if draft.read and draft.read.ready]
        offers: list[Offer | None] = [None] * len(news)
        if not places:
            return offers
        drafts = [news[i][0] for i in places]
        reads = [draft.read for draft in drafts if draft.read]
        count = max(wanted[i] for i in places)
        try:
            found = self._model.propose(reads, count, _TREE_WIDTH if trees else 1, _ranker(drafts))
        except NoPages:
            return offers
        found = found.on_host()
        for row, place in enumerate(places):
            offers[place] = _offer(found, row, wanted[place])
        return offers

    def _extend(self, news: list[tuple[HeadDraft, News]]) -> None:
        """Read new tokens and features; a draft without pages starts over with later features."""
        batch = []
        for draft, new in news:
            if draft.read is None:
                draft.grammar = draft.grammar or GrammarState.of(draft.sequence, self._grammars)
                draft.read = self._model.open(new.tokens, draft.sequence.opened.tenant)
                new = News([], new.first_position, new.features)
            features = _joined(new.features, draft)
            extension = Extension(
                draft.read, new.tokens, features, new.first_position, draft.projected
            )
            batch.append((draft, extension))
        try:
            self._model.extend([extension for _, extension in batch])
        except NoPages:
            for draft, extension in batch:
                self._extend_alone(draft, extension)
        except Exception:  # the caller gets it from its future
            # The head may have read a part of the new tokens and features.
            self._forget(news)
            raise

    def _forget(self, news: Sequence[tuple[HeadDraft, News]]) -> None:
        """Close drafts that missed tokens or features. Each draft gets all its tokens anew."""
        for draft, _ in news:
            self._close(draft)
            draft.failed = True

    def _extend_alone(self, draft: HeadDraft, extension: Extension) -> None:
        try:
            self._model.extend([extension])
        except NoPages:
            tokens = [*extension.sequence.tokens, *extension.tokens]
            self._model.close(extension.sequence)
            draft.read = HeadSequence(tokens)

    def _close(self, draft: HeadDraft) -> None:
        if draft.read is not None:
            self._model.close(draft.read)
            draft.read = None


def _joined(parts: Sequence[SharedRows], draft: HeadDraft) -> torch.Tensor:
    """Return the features as one tensor, for the head's CUDA stream."""
    if not parts:
        return torch.empty(0, draft.width, dtype=draft.dtype)
    return torch.cat([part.read() for part in parts])


def _ranker(drafts: list[HeadDraft]) -> Rank | None:
    """Return a function that ranks the next tokens of each draft; None to take the likeliest.

    With coupled noise, tokens rank in the order in which the noise would draw them.
    """
    openings = [draft.sequence.opened for draft in drafts]
    coupled = {
        i
        for i, opened in enumerate(openings)
        if opened.distribution is DraftDistribution.COUPLED and not opened.sampling.greedy
    }
    adjusts = any(draft.grammar or draft.sequence.opened.sampling.adjusts for draft in drafts)
    if not coupled and not adjusts:
        return None
    texts = [draft.read.tokens for draft in drafts if draft.read]

    def context(i: int, run: Sequence[int]) -> Context:
        opened, grammar, length = openings[i], drafts[i].grammar, openings[i].prompt_length
        mask = grammar.mask([*texts[i][length:], *run]) if grammar else None
        # Only the settings of `adjusts`, such as penalties, need the committed tokens, which may be
        # many.
        text = [*texts[i], *run] if opened.sampling.adjusts else []
        return Context(opened.sampling, text, length if text else 0, mask=mask)

    def rank(
        places: Sequence[Place], scores_RV: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if adjusts:
            scores_RV = adjust(scores_RV, [context(i, run) for i, run in places])
        shares, tokens = scores_RV.softmax(-1).topk(width)
        rows = [row for row, (i, _) in enumerate(places) if i in coupled]
        if rows:
            drawn = [places[row] for row in rows]
            rows_R = on(scores_RV.device, rows)
            probs = target_probs(
                scores_RV.index_select(0, rows_R), [openings[i].sampling for i, _ in drawn]
            )
            seeds = [drafts[i].seed for i, _ in drawn]
            keys = coupled_keys(seeds, [len(texts[i]) + len(run) for i, run in drawn])
            drawn_RK, best_RK = coupled_top(probs, on(probs.device, keys), width)
            tokens.index_copy_(0, rows_R, drawn_RK)
            shares.index_copy_(0, rows_R, best_RK.to(shares.dtype))
        # A row whose every token is forbidden has no probabilities.
        return tokens, shares.nan_to_num(0.0)

    return rank


def _offer(found: HeadProposal, row: int, wanted: int) -> Offer:
    """Return a sequence's guesses before the first guess that the request forbids."""
    pairs = zip(found.tokens[row].tolist(), found.confidences[row].tolist(), strict=True)
    kept = [*takewhile(lambda pair: pair[1] >= _LEAST_SHARE, pairs)][:wanted]
    tokens = [token for token, _ in kept]
    best, shares = found.best[row].tolist(), found.shares[row].tolist()
    alternatives = [
        [
            (other, share)
            for other, share in zip(best[at], shares[at], strict=True)
            if other != token and share >= _LEAST_SHARE
        ]
        for at, token in enumerate(tokens)
    ]
    beside = found.deeper[row] if found.deeper else ()
    deeper = [branch for branch in beside if min(branch.shares) >= _LEAST_SHARE]
    return Offer(tokens, [min(share, 1.0) for _, share in kept], alternatives, deeper)


def _page_count(spec: HeadSpec, dtype: torch.dtype) -> int:
    """Return the number of pages for `_FULL_CONTEXTS` full contexts, in at most `_CACHE_BYTES`."""
    decoder: Decoder | None = spec.decoder
    if decoder is None:
        return 1
    numbers = 2 * decoder.layer_count * decoder.kv_head_count * decoder.head_size * _PAGE_SIZE
    useful = _FULL_CONTEXTS * -(-spec.target.context_length // _PAGE_SIZE)
    return max(1, min(_CACHE_BYTES // (numbers * dtype.itemsize), useful))
