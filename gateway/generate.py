"""The core that HTTP and gRPC share: one prompt in, pieces of text out. Knows no HTTP and no request's own shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from gateway.metrics import Metrics, SequenceClock
from gateway.prompts import Prompts, context_overflow
from gateway.routing import Replica, Router
from gateway.text import Detokenizer, TextStream, TokenOffsets, TokenTable
from outrider.errors import OutriderError, Reason, invalid
from outrider.messages import (
    MAX_DEPTH,
    FinishReason,
    Grammar,
    ModelInfo,
    SamplingParams,
    SpeculationOptions,
    SpeculationStats,
    TokenChunk,
    TokenLogprob,
    TokenRequest,
    TokenSource,
)

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
# OpenAI's number for a token that cannot come, since JSON has no infinity.
_LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One sequence to generate. `prompt_field`, `limit_field` and `grammar_field` are what the caller calls its prompt, its
    max_tokens and its grammar.

    `whole` says that nobody sees the text before it is complete, which spares both sides the messages in between.
    `max_tokens` None takes what the context leaves, and `default_max_tokens` at most that much. `echo` is the prompt's text when
    the answer is to begin with it. `top_logprobs` and `prompt_logprobs` are as in `TokenRequest`.
    """

    prompt: list[int]
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    model: str = ""
    request_id: str = ""
    traceparent: str = ""
    prompt_field: str = "prompt"
    limit_field: str = "max_tokens"
    whole: bool = False
    echo: str | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    grammar_field: str = "grammar"
    prediction: list[int] = field(default_factory=list)
    operation: str = "text_completion"
    """OpenTelemetry's name of what is asked for."""
    tenant: str = ""
    authored: bool = False
    """Whether pieces say who wrote each token."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence ended, and what it took."""

    reason: FinishReason
    prompt_token_count: int
    completion_token_count: int
    cached_token_count: int
    stats: SpeculationStats


@dataclass(frozen=True, slots=True)
class ShownToken:
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
    top: Sequence[ShownToken] = ()


@dataclass(frozen=True, slots=True)
class AuthoredToken:
    """What a token adds to the text, whole characters only, and who wrote it: `drafter_id` is empty when no draft was verified."""

    text: str
    source: TokenSource
    drafter_id: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of whole characters, and the tokens that came with it; the last piece has the ending.

    `shown` and `logprobs` are empty unless log probabilities were asked for, and `authored` unless authors were; a token that ends
    the text unseen is in `shown` only with an echo. `prompt` and `prompt_logprobs` are the next tokens of the prompt, if those were
    asked for: the whole prompt comes before the first generated token or with it. The prompt's first token is in `prompt` alone.
    """

    text: str
    token_ids: Sequence[int]
    sources: Sequence[TokenSource]
    drafter_id: str = ""
    ending: Ending | None = None
    logprobs: Sequence[TokenLogprob] = ()
    shown: Sequence[ShownToken] = ()
    authored: Sequence[AuthoredToken] = ()
    prompt: Sequence[ShownToken] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()


class Generation:
    """Generates text with the verifier's replicas."""

    def __init__(self, router: Router, prompts: Prompts, metrics: Metrics) -> None:
        self.router = router
        self.prompts = prompts
        self._metrics = metrics
        self._table = TokenTable(prompts.tokenizer)

    def echo(self, prompt: str | list[int], info: ModelInfo) -> str:
        """The text of a prompt, as the answer repeats it; raises OutriderError(INVALID_VALUE) for ids that there are not."""
        if isinstance(prompt, str):
            return prompt
        _check_ids("prompt", prompt, info)
        return self._table.decode(prompt)

    async def stream(self, request: TextRequest) -> AsyncGenerator[Piece, None]:
        """The text of one request, piece by piece. Closing the iterator cancels the sequence everywhere.

        A verifier that goes before it has said anything leaves the request to another replica. Raises OutriderError: what
        `Router.pick` and `token_request` raise, and whatever the verifier reports.
        """
        name, info, replica = self.router.pick(request.model)
        tokens = token_request(request, info)
        clock = SequenceClock(self._metrics, name, request.operation, len(tokens.prompt))
        sequence = _Sequence(request, tokens, info, self._table)
        try:
            async with aclosing(self._chunks(name, info, replica, tokens)) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids:
                        clock.chunk(len(chunk.token_ids))
                    self._count(chunk, clock, gathered=tokens.min_chunk_tokens > 1)
                    piece = sequence.take(chunk)
                    if piece.ending is not None:
                        clock.finished(piece.ending.reason)
                    yield piece
                    if piece.ending is not None:
                        return
        except OutriderError as error:
            clock.failed(error.reason.name)
            if error.field is not None and error.field.startswith("grammar."):
                # The verifier knows the grammar by the wire's name, the caller by its own.
                message = error.message.replace(error.field, request.grammar_field)
                raise replace(error, message=message, field=request.grammar_field) from error
            raise
        finally:
            clock.close()

    async def _chunks(self, name: str, info: ModelInfo, replica: Replica, tokens: TokenRequest) -> AsyncGenerator[TokenChunk, None]:
        """What a replica of the model generates, to the last chunk."""
        said, left = False, tokens.max_tokens
        while True:
            try:
                with replica.busy():
                    async with aclosing(replica.tokens.generate(tokens)) as chunks:
                        async for chunk in chunks:
                            said = True
                            left = check_chunk(chunk, info, left, replica.address)
                            yield chunk
                            if chunk.finish_reason is not None:
                                return
                raise OutriderError(Reason.VERIFIER_UNAVAILABLE, f"verifier {replica.address} ended without a finish reason")
            except OutriderError as error:
                if said:
                    raise
                replica = self.router.instead_of(replica, error, name)

    def _count(self, chunk: TokenChunk, clock: SequenceClock, *, gathered: bool) -> None:
        """Count a chunk; one that gathers several steps leaves it to the last to say what became of their drafts."""
        activity = self._metrics.activity
        activity.add(chunk)
        if gathered and chunk.stats is not None:
            counts = chunk.stats.histogram
        elif not gathered and chunk.draft_token_count:
            counts = [0] * chunk.sources.count(TokenSource.ACCEPTED) + [1]
        else:
            counts = []
        activity.verified(counts)
        clock.verified(chunk.draft_token_count, counts)


def check_chunk(chunk: TokenChunk, info: ModelInfo, left: int, address: str) -> int:
    """How many tokens may come after this chunk, when `left` might until now.

    Raises OutriderError(INTERNAL) for what no verifier of this model can say.
    """
    ids, listed = chunk.token_ids, [chunk.token_ids, *(known.top_token_ids for known in (*chunk.logprobs, *chunk.prompt_logprobs))]
    problem = ""
    if any(of_one and max(of_one) >= info.vocab_size for of_one in listed):
        problem = f"a token id that is not in [0, {info.vocab_size})"
    elif len(ids) > left:
        problem = "more tokens than it was asked for"
    elif len(chunk.sources) != len(ids) or (chunk.logprobs and len(chunk.logprobs) != len(ids)):
        problem = "tokens without a source or a log probability each"
    elif chunk.stats is not None and len(chunk.stats.histogram) > MAX_DEPTH + 1:
        problem = f"an acceptance histogram of {len(chunk.stats.histogram)} entries"
    if problem:
        raise OutriderError(Reason.INTERNAL, f"verifier {address} sent {problem}")
    return left - len(ids)


class _Sequence:
    """Turns the chunks of one sequence into pieces."""

    def __init__(self, request: TextRequest, tokens: TokenRequest, info: ModelInfo, table: TokenTable) -> None:
        self._request = request
        self._end_ids = tokens.stop_token_ids | frozenset(() if tokens.ignore_eos else info.eos_token_ids)
        self._text = TextStream(table, request.stop)
        self._table = table
        # Decodes token by token, where each one's author is wanted.
        self._authors = Detokenizer(table) if request.authored else None
        self._echo = request.echo or ""
        self._prompt_shown = 0
        self._prompt_offsets = TokenOffsets(table, text=self._echo)
        self._offsets = TokenOffsets(table, at=len(self._echo))
        # Kept for the case that a stop string ends the sequence, since then the verifier's own statistics never come.
        depth = info.max_depth if request.speculation.depth is None else request.speculation.depth
        self._stats = SpeculationStats(max_depth=depth if request.speculation.enabled else 0)

    def take(self, chunk: TokenChunk) -> Piece:
        """The piece for the next chunk."""
        ids = chunk.token_ids
        ended_by_token = chunk.finish_reason is FinishReason.STOP and bool(ids) and ids[-1] in self._end_ids
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
        # Who scores texts by their echo counts tokens from its end, whichever the last one is.
        listed = seen if self._request.echo is None else used
        shown = [self._show(*pair, self._offsets) for pair in zip(ids[:listed], logprobs, strict=False)]
        ending = self._ending(chunk, ended_by_token)
        authored = self._authored(chunk, ids[:seen], last=ending is not None) if self._authors is not None else ()
        prompt, text, self._echo = self._show_prompt(chunk), self._echo + text, ""
        return Piece(text, ids[:used], sources, chunk.drafter_id, ending, logprobs, shown, authored, prompt, chunk.prompt_logprobs)

    def _show_prompt(self, chunk: TokenChunk) -> list[ShownToken]:
        """The next tokens of the prompt, if they are wanted: the first, of which nothing is known, comes with the first chunk."""
        if self._request.prompt_logprobs is None:
            return []
        known: list[TokenLogprob | None] = [None, *chunk.prompt_logprobs] if self._prompt_shown == 0 else [*chunk.prompt_logprobs]
        begin, self._prompt_shown = self._prompt_shown, self._prompt_shown + len(known)
        ids = self._request.prompt[begin : self._prompt_shown]
        return [self._show(*pair, self._prompt_offsets) for pair in zip(ids, known, strict=False)]

    def _authored(self, chunk: TokenChunk, ids: Sequence[int], *, last: bool) -> list[AuthoredToken]:
        """Who wrote which part of the text; what is held back of a character goes to the token that completes it."""
        if self._authors is None:
            return []
        texts = [self._authors.push([token_id]) for token_id in ids]
        if last and texts:
            texts[-1] += self._authors.finish()
        return [AuthoredToken(text, source, chunk.drafter_id) for text, source in zip(texts, chunk.sources, strict=False)]

    def _show(self, token: int, known: TokenLogprob | None, offsets: TokenOffsets) -> ShownToken:
        shown, offset = self._table.piece_and_bytes(token), offsets.push(token)
        if known is None:
            return ShownToken(token, *shown, None, offset=offset)
        likeliest = enumerate(zip(known.top_token_ids, known.top_logprobs, strict=True), 1)
        top = [ShownToken(other, *self._table.piece_and_bytes(other), _finite(p), rank) for rank, (other, p) in likeliest]
        return ShownToken(token, *shown, _finite(known.logprob), known.rank, offset, top)

    def _ending(self, chunk: TokenChunk, ended_by_token: bool) -> Ending | None:
        stopped = self._text.stopped
        reason = FinishReason.STOP if stopped else chunk.finish_reason
        if reason is None:
            return None
        stats = self._stats if stopped or chunk.stats is None else chunk.stats
        count = self._text.token_count + (ended_by_token and not stopped)
        return Ending(reason, len(self._request.prompt), count, chunk.cached_token_count, stats)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def token_request(request: TextRequest, info: ModelInfo) -> TokenRequest:
    """What the verifier is asked; raises OutriderError that names the caller's own field and the limit."""
    prompt, name = request.prompt, request.prompt_field
    if not prompt:
        raise invalid(name, "must hold at least 1 token")
    _check_ids(name, prompt, info)
    max_tokens = _max_tokens(request, info.context_length)
    if request.sampling.min_tokens > max_tokens:
        raise invalid(
            "min_tokens", f"must be at most {request.limit_field}, which is {max_tokens}, not {request.sampling.min_tokens}"
        )
    return TokenRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        speculation=request.speculation,
        request_id=request.request_id,
        traceparent=request.traceparent,
        # A stop string has to be looked for as the text grows.
        min_chunk_tokens=max_tokens if request.whole and not request.stop and not request.authored else 1,
        top_logprobs=request.top_logprobs,
        # A verifier generates nothing only for who wants the prompt scored.
        prompt_logprobs=0 if max_tokens == 0 and request.prompt_logprobs is None else request.prompt_logprobs,
        grammar=request.grammar,
        prediction=request.prediction,
        tenant=request.tenant,
    )


def _check_ids(name: str, prompt: list[int], info: ModelInfo) -> None:
    outside = next((index for index in (min(prompt), max(prompt)) if not 0 <= index < info.vocab_size), None)
    if outside is not None:
        raise invalid(name, f"must hold token ids in [0, {info.vocab_size}), not {outside}")


def _max_tokens(request: TextRequest, context_length: int) -> int:
    left, length = context_length - len(request.prompt), len(request.prompt)
    # An answer of no tokens still tells something of the prompt where that was asked for.
    least = 1 if request.echo is None and request.prompt_logprobs is None else 0
    if left < (least if request.max_tokens == 0 else 1):
        message = f"{request.prompt_field} has {length} tokens, and the answer needs room too"
        raise context_overflow(context_length, message, request.prompt_field)
    if request.max_tokens is None:
        return left if request.default_max_tokens is None else min(left, request.default_max_tokens)
    if request.max_tokens < least:
        raise invalid(request.limit_field, f"must be at least {least}, not {request.max_tokens}")
    if request.max_tokens > left:
        message = f"{request.limit_field} asks for {request.max_tokens} tokens after a prompt of {length}"
        raise context_overflow(context_length, message, request.limit_field)
    return request.max_tokens


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """The stop strings when they are within bounds; raises OutriderError(INVALID_VALUE) otherwise."""
    if len(stop) > MAX_STOP_STRINGS:
        raise invalid("stop", f"must hold at most {MAX_STOP_STRINGS} strings, not {len(stop)}")
    for index, text in enumerate(stop):
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise invalid(f"stop[{index}]", f"must have 1 to {MAX_STOP_CHARACTERS} characters, not {len(text)}")
    return tuple(stop)
