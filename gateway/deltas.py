"""A verifier's chunks of one sequence as deltas of text. Knows the tokenizer and the request, but no replica and no API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.request import TextRequest
from gateway.text import Detokenizer, TextStream, TokenOffsets, TokenTable
from outrider.messages import FinishReason, SpeculationStats, TokenChunk, TokenLogprob, TokenSource
from outrider.model_info import ModelInfo

# OpenAI's number for a token that cannot come, since JSON has no infinity.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class FinishInfo:
    """How a sequence ended, and what it took."""

    reason: FinishReason
    prompt_token_count: int
    completion_token_count: int
    cached_token_count: int
    stats: SpeculationStats


@dataclass(frozen=True, slots=True)
class LogprobToken:
    """A token as log probabilities show it, with the likeliest alternatives, best first.

    `raw` are its own bytes, which `text` cannot show of part of a character. `logprob` is None for the first token of a prompt,
    which nothing precedes. `offset` is where in the answer's text it begins, in characters; alternatives have none.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    rank: int = 0
    offset: int = 0
    top: Sequence[LogprobToken] = ()


@dataclass(frozen=True, slots=True)
class AttributedToken:
    """What a token adds to the text, whole characters only, and who wrote it: `drafter_id` is empty when no draft was verified."""

    text: str
    source: TokenSource
    drafter_id: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text of whole characters, and the tokens that came with it; the last delta has `finish`.

    `shown` and `logprobs` are empty unless log probabilities were asked for, and `attributed` unless authors were; a token that
    ends the text unseen is in `shown` only with an echo. `prompt` and `prompt_logprobs` are the next tokens of the prompt, if
    those were asked for: the whole prompt comes before the first generated token or with it. The prompt's first token is in
    `prompt` alone.
    """

    text: str
    token_ids: Sequence[int]
    sources: Sequence[TokenSource]
    drafter_id: str = ""
    finish: FinishInfo | None = None
    logprobs: Sequence[TokenLogprob] = ()
    shown: Sequence[LogprobToken] = ()
    attributed: Sequence[AttributedToken] = ()
    prompt: Sequence[LogprobToken] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()


class DeltaBuilder:
    """Turns the chunks of one sequence into deltas."""

    def __init__(self, request: TextRequest, info: ModelInfo, table: TokenTable) -> None:
        tokens = request.tokens
        self._request = request
        self._end_ids = tokens.stop_token_ids | frozenset(
            () if tokens.ignore_eos else info.eos_token_ids
        )
        self._text = TextStream(table, request.stop)
        self._table = table
        # Decodes token by token, where each one's author is wanted.
        self._authors = Detokenizer(table) if request.attributed else None
        self._echo = request.echo or ""
        self._prompt_shown = 0
        self._prompt_offsets = TokenOffsets(table, text=self._echo)
        self._offsets = TokenOffsets(table, at=len(self._echo))
        # Kept for the case that a stop string ends the sequence, since then the verifier's own statistics never come.
        depth = (
            info.max_draft_tokens
            if tokens.speculation.draft_tokens is None
            else tokens.speculation.draft_tokens
        )
        self._stats = SpeculationStats(max_draft_tokens=depth if tokens.speculation.enabled else 0)

    def add(self, chunk: TokenChunk) -> TextDelta:
        """The delta for the next chunk."""
        ids = chunk.token_ids
        ended_by_token = (
            chunk.finish_reason is FinishReason.STOP and bool(ids) and ids[-1] in self._end_ids
        )
        before = self._text.token_count
        text = self._text.push(ids[:-1] if ended_by_token else ids)
        if chunk.finish_reason is not None and not self._text.stopped:
            text += self._text.finish()
        used = self._text.token_count - before if self._text.stopped else len(ids)
        sources = chunk.sources[:used]
        if ids:
            self._stats.record(chunk.draft_token_count, sources.count(TokenSource.ACCEPTED))
        logprobs = chunk.logprobs[:used]
        seen = used - 1 if ended_by_token and used == len(ids) else used
        # Evaluations that score a text by its echo count tokens from its end, whichever the last one is.
        listed = seen if self._request.echo is None else used
        shown = [
            self._show(*pair, self._offsets) for pair in zip(ids[:listed], logprobs, strict=False)
        ]
        finish = self._finish(chunk, ended_by_token)
        attributed = self._attribute(chunk, ids[:seen], last=finish is not None)
        prompt, text, self._echo = self._show_prompt(chunk), self._echo + text, ""
        return TextDelta(
            text,
            ids[:used],
            sources,
            chunk.drafter_id,
            finish,
            logprobs,
            shown,
            attributed,
            prompt,
            chunk.prompt_logprobs,
        )

    def _show_prompt(self, chunk: TokenChunk) -> list[LogprobToken]:
        """The next tokens of the prompt, if they are wanted: the first, of which nothing is known, comes with the first chunk."""
        if not self._request.shows_prompt:
            return []
        first: list[TokenLogprob | None] = [None] if self._prompt_shown == 0 else []
        known = [*first, *chunk.prompt_logprobs]
        begin, self._prompt_shown = self._prompt_shown, self._prompt_shown + len(known)
        ids = self._request.tokens.prompt[begin : self._prompt_shown]
        return [self._show(*pair, self._prompt_offsets) for pair in zip(ids, known, strict=False)]

    def _attribute(
        self, chunk: TokenChunk, ids: Sequence[int], *, last: bool
    ) -> list[AttributedToken]:
        """Who wrote which part of the text; what is held back of a character goes to the token that completes it."""
        if self._authors is None:
            return []
        texts = [self._authors.push([token_id]) for token_id in ids]
        if last and texts:
            texts[-1] += self._authors.finish()
        return [
            AttributedToken(text, source, chunk.drafter_id)
            for text, source in zip(texts, chunk.sources, strict=False)
        ]

    def _show(self, token: int, known: TokenLogprob | None, offsets: TokenOffsets) -> LogprobToken:
        text_and_bytes, offset = self._table.piece_and_bytes(token), offsets.push(token)
        if known is None:
            return LogprobToken(token, *text_and_bytes, None, offset=offset)
        top = [
            LogprobToken(
                other, *self._table.piece_and_bytes(other), max(logprob, _LEAST_LOGPROB), rank
            )
            for rank, (other, logprob) in enumerate(
                zip(known.top_token_ids, known.top_logprobs, strict=True), 1
            )
        ]
        return LogprobToken(
            token, *text_and_bytes, max(known.logprob, _LEAST_LOGPROB), known.rank, offset, top
        )

    def _finish(self, chunk: TokenChunk, ended_by_token: bool) -> FinishInfo | None:
        stopped = self._text.stopped
        reason = FinishReason.STOP if stopped else chunk.finish_reason
        if reason is None:
            return None
        stats = self._stats if stopped or chunk.stats is None else chunk.stats
        count = self._text.token_count + (ended_by_token and not stopped)
        return FinishInfo(
            reason, len(self._request.tokens.prompt), count, chunk.cached_token_count, stats
        )
