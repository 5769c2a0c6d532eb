"""Turns the token chunks of one sequence into text deltas, for any replica and API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from gateway.text.request import TextRequest
from gateway.text.text_stream import Detokenizer, TextStream, TokenOffsets
from gateway.text.token_table import TokenTable
from gateway.tools.reader import AnswerReader, Content, Part
from outrider.protocol.messages import (
    AcceptanceRule,
    FinishReason,
    SpeculationStats,
    TokenChunk,
    TokenLogprob,
    TokenSource,
)
from outrider.protocol.model_info import ModelInfo

# OpenAI's log probability of an impossible token. JSON has no infinity.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class FinishInfo:
    """The reason why a sequence ended, and its usage."""

    reason: FinishReason
    prompt_token_count: int
    completion_token_count: int
    cached_token_count: int
    stats: SpeculationStats
    resumed_count: int = 0
    """The number of times that another verifier continued the sequence."""
    grammar_incomplete: bool = False
    """True if `max_tokens` ended the text before the token that ends its grammar."""
    call_count: int = 0
    """The number of calls of tools in the answer."""
    stop: str = ""
    """The stop string that ended the answer, if one did."""


@dataclass(frozen=True, slots=True)
class LogprobToken:
    """A token with its log probability and its likeliest alternatives (`top`), best first.

    `raw` has the token's bytes. If these bytes are only part of a character, the token's text is
    U+FFFD. `logprob` is None for the first token of a prompt. `offset` is where the token begins in
    the answer's text, in characters; it is 0 for alternatives.
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
    """The text that a token adds, in whole characters, and the token's source.

    `drafter_id` is empty if the step verified no draft. `part` is the field of the answer's message
    to which the token belongs, such as tool_calls[0]. The marks around a call belong to its field.
    `part` is empty if the answer can have only content. `part` is None for blanks and for possible
    beginnings of marks. Such a token belongs to the part of the next token whose `part` is not
    None. If none follows, it belongs to the part of the last token whose `part` is not None.
    """

    text: str
    source: TokenSource
    drafter_id: str
    part: str | None = ""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text in whole characters, and its tokens. The last delta of a sequence has `finish`.

    `text` is content. `parts` has the content in its place among thoughts and calls; it is empty if
    the delta has only content.
    `shown` and `logprobs` list the tokens' log probabilities, and `attributed` their sources, if
    the request asks for them. A token that ends the text is in `shown` only with an echo.
    `prompt` and `prompt_logprobs` list the prompt's next tokens if the request asks for them;
    the last of them come with the first generated token. `prompt` begins with the prompt's first
    token, which has no log probability and is not in `prompt_logprobs`.
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
    parts: Sequence[Part] = ()

    @property
    def all_parts(self) -> Sequence[Part]:
        """The delta's parts. If the delta has only text, the text is its only part."""
        return self.parts or ([Content(self.text)] if self.text else [])


class DeltaBuilder:
    """Turns the chunks of one sequence into deltas."""

    def __init__(self, request: TextRequest, info: ModelInfo, table: TokenTable) -> None:
        tokens = request.tokens
        self._request = request
        self._end_ids = tokens.stop_token_ids
        if not tokens.ignore_eos:
            self._end_ids |= frozenset(info.eos_token_ids)
        reading = request.reading
        prompt = tokens.prompt
        # A grammar's text keeps a first space, whatever text precedes it.
        within = tokens.grammar is not None
        self._text = TextStream(
            table,
            request.stop,
            tokens.sampling.min_tokens,
            reading,
            prompt=prompt,
            within=within,
        )
        # `_attribution` decodes token by token to find the text of each token.
        hidden = None if reading is None else table.hidden_ids(reading.literals)
        self._attribution = None
        if request.attributed:
            self._attribution = Detokenizer(table, hidden, prompt=prompt, within=within)
        # `_attribution_reader` finds the part of the answer to which each token belongs. `_text`
        # gives only the text of parts, not of tokens.
        places = request.attributed and reading is not None
        self._attribution_reader = AnswerReader(reading) if places and reading else None
        self._echo = request.echo or ""
        self._prompt_shown = 0
        self._prompt_offsets = TokenOffsets(table, text=self._echo)
        self._offsets = TokenOffsets(table, at=len(self._echo), prompt=prompt, within=within)
        # These statistics count if a stop string ends the sequence, since the verifier's statistics
        # then never arrive.
        self._stats = SpeculationStats(max_draft_tokens=_max_draft_tokens(request, info))
        # The statistics from earlier verifiers.
        self._earlier_stats = SpeculationStats()
        self._resumed_count = 0
        self._cached_token_count = 0

    def resumed(self) -> None:
        """Note that the next chunk comes from another verifier.

        Its statistics begin anew. Its prefix cache may hold the answer's tokens too, so only the
        first verifier's cached tokens count.
        """
        self._resumed_count += 1
        rule = AcceptanceRule.__members__.get(self._request.tokens.speculation.acceptance.name)
        if rule is not None and self._stats.draft_count:
            # The answer must say that it is lossy, even if no draft is verified from here on.
            self._stats.rules = [rule]
        self._earlier_stats = total_stats(self._earlier_stats, self._stats)
        self._stats = SpeculationStats(max_draft_tokens=self._stats.max_draft_tokens)

    def add(self, chunk: TokenChunk) -> TextDelta:
        """Return the delta for the next chunk."""
        ids = chunk.token_ids
        stops = chunk.finish_reason is FinishReason.STOP and bool(ids)
        by_token = stops and ids[-1] in self._end_ids
        parts, used = self._add_text(chunk, ended_by_token=by_token)
        text = "".join([part.text for part in parts if isinstance(part, Content)])
        sources = chunk.sources[:used]
        if ids and self._request.tokens.min_chunk_tokens > 1:
            _record_steps(self._stats, sources, chunk.draft_token_count)
        elif ids:
            accepted = sum([source.is_accepted for source in sources])
            self._stats.record(chunk.draft_token_count, accepted)
        if self._resumed_count == 0:
            self._cached_token_count = max(self._cached_token_count, chunk.cached_token_count)
        visible = used - 1 if by_token and used == len(ids) else used
        # With an echo the ending token is listed too: evaluations that score an echoed text count
        # tokens from its end.
        listed = visible if self._request.echo is None else used
        logprobs = chunk.logprobs[:used]
        shown = zip(ids[:listed], logprobs, strict=False)
        finish = self._finish(chunk, by_token)
        echo = self._echo
        self._echo = ""
        return TextDelta(
            echo + text,
            ids[:used],
            sources,
            chunk.drafter_id,
            finish,
            logprobs,
            shown=[self._show(token, known, self._offsets) for token, known in shown],
            attributed=self._attribute(chunk, ids[:visible], last=finish is not None),
            prompt=self._show_prompt(chunk),
            prompt_logprobs=chunk.prompt_logprobs,
            parts=() if all(isinstance(part, Content) for part in parts) else parts,
        )

    def _add_text(self, chunk: TokenChunk, *, ended_by_token: bool) -> tuple[list[Part], int]:
        """Return the parts that the chunk adds, and how many of its tokens belong to the answer.

        Tokens after the token that completes a stop string do not belong to the answer.
        """
        ids = chunk.token_ids
        before = self._text.token_count
        parts = self._text.push(ids[:-1] if ended_by_token else ids)
        if chunk.finish_reason is not None and not self._text.stopped:
            parts += self._text.finish()
        used = len(ids)
        if self._text.stopped:
            used = self._text.token_count - before
        return parts, used

    def _show_prompt(self, chunk: TokenChunk) -> list[LogprobToken]:
        """Return the prompt's next tokens if the request asks for them.

        The prompt's first token comes with the first chunk. Its log probability is None.
        """
        if not self._request.shows_prompt:
            return []
        begin = self._prompt_shown
        first: list[TokenLogprob | None] = [None] if begin == 0 else []
        known = [*first, *chunk.prompt_logprobs]
        self._prompt_shown += len(known)
        ids = self._request.tokens.prompt[begin : self._prompt_shown]
        return [self._show(*pair, self._prompt_offsets) for pair in zip(ids, known, strict=False)]

    def _attribute(
        self, chunk: TokenChunk, ids: Sequence[int], *, last: bool
    ) -> list[AttributedToken]:
        """Return the text and source of each token.

        A character belongs to the token that completes it.
        """
        if self._attribution is None:
            return []
        texts = [self._attribution.push([token_id]) for token_id in ids]
        if last and texts:
            texts[-1] += self._attribution.finish()
        reader = self._attribution_reader
        parts = [""] * len(texts) if reader is None else map(reader.place, texts)
        return [
            AttributedToken(text, source, chunk.drafter_id, part)
            for text, source, part in zip(texts, chunk.sources, parts, strict=False)
        ]

    def _show(self, token: int, known: TokenLogprob | None, offsets: TokenOffsets) -> LogprobToken:
        """Return the token with its log probability, which is None if `known` is None."""
        text, raw = offsets.text_and_bytes(token)
        if known is None:
            return LogprobToken(token, text, raw, None, offset=offsets.push(token))
        likeliest = zip(known.top_token_ids, known.top_logprobs, strict=True)
        top = [
            LogprobToken(other, *offsets.text_and_bytes(other), _finite(logprob), rank)
            for rank, (other, logprob) in enumerate(likeliest, 1)
        ]
        offset = offsets.push(token)
        return LogprobToken(token, text, raw, _finite(known.logprob), known.rank, offset, top)

    def _finish(self, chunk: TokenChunk, ended_by_token: bool) -> FinishInfo | None:
        """Return how the sequence ended, if this chunk or a stop string ends it."""
        stopped = self._text.stopped
        reason = FinishReason.STOP if stopped else chunk.finish_reason
        if reason is None:
            return None
        stats = self._stats
        if not stopped and chunk.stats is not None:
            stats = chunk.stats
        stats = total_stats(self._earlier_stats, stats)
        count = self._text.token_count + (ended_by_token and not stopped)
        request = self._request.tokens
        prompt_count = len(request.prompt)
        cached = self._cached_token_count
        incomplete = request.grammar is not None and reason is FinishReason.LENGTH
        resumed = self._resumed_count
        calls, stop = self._text.call_count, self._text.stop
        return FinishInfo(
            reason, prompt_count, count, cached, stats, resumed, incomplete, calls, stop
        )


def total_stats(earlier: SpeculationStats, later: SpeculationStats) -> SpeculationStats:
    """Return the statistics of two parts of a sequence together."""
    if earlier.forward_count == 0:
        return later
    return SpeculationStats(
        earlier.forward_count + later.forward_count,
        earlier.draft_count + later.draft_count,
        earlier.draft_token_count + later.draft_token_count,
        earlier.accepted_token_count + later.accepted_token_count,
        [sum(pair) for pair in zip_longest(earlier.histogram, later.histogram, fillvalue=0)],
        later.max_draft_tokens,
        [*earlier.rules, *(rule for rule in later.rules if rule not in earlier.rules)],
        later.paused,
    )


def _record_steps(stats: SpeculationStats, sources: Sequence[TokenSource], drafted: int) -> None:
    """Count several coalesced steps, which verified `drafted` tokens together.

    Each step ends with a token that is not an accepted draft token. The text may end before this
    token of the last step.
    """
    before = stats.draft_token_count
    accepted = 0
    for count, source in enumerate(sources, 1):
        accepted += source.is_accepted
        if not source.is_accepted or count == len(sources):
            stats.record(0 if source is TokenSource.PLAIN else accepted + 1, accepted)
            accepted = 0
    stats.draft_token_count = before + drafted


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _max_draft_tokens(request: TextRequest, info: ModelInfo) -> int:
    speculation = request.tokens.speculation
    if not speculation.enabled:
        return 0
    if speculation.draft_tokens is None:
        return info.max_draft_tokens
    return speculation.draft_tokens
