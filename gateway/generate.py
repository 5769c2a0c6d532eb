"""Runs a request's sequences on one replica, to the end or on to the next. Knows no HTTP, no gRPC and no limit of a request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache

from gateway.choices import Event, merge
from gateway.deltas import DeltaBuilder, TextDelta
from gateway.metrics import Metrics, SequenceClock
from gateway.prompts import Prompts
from gateway.request import TextRequest, check_ids
from gateway.routing import Pick, Router
from gateway.text import TokenTable
from outrider.errors import OutriderError, Reason
from outrider.messages import MAX_DEPTH, ModelInfo, TokenChunk, TokenSource

Build = Callable[[ModelInfo], Sequence[TextRequest]]
"""Checks what was asked for against a model, and builds the request's sequences. Raises OutriderError that names the field."""


class Generation:
    """Generates text with the verifier's replicas."""

    def __init__(self, router: Router, prompts: Prompts, metrics: Metrics) -> None:
        self.router = router
        self.prompts = prompts
        self.metrics = metrics
        self.table = TokenTable(prompts.tokenizer)

    def echo(self, prompt: str | list[int], info: ModelInfo) -> str:
        """The text of a prompt, as the answer repeats it; raises OutriderError(INVALID_VALUE) for ids that there are not."""
        if isinstance(prompt, str):
            return prompt
        check_ids("prompt", prompt, info)
        return self.table.decode(prompt)

    async def generate(self, model: str, operation: str, build: Build) -> AsyncGenerator[Event, None]:
        """The deltas of all sequences of a request as they come. Closing the iterator cancels the sequences everywhere.

        One replica is picked; the request is built for its model and runs there. A sequence that the replica loses before its
        first tokens moves to another one, where it is checked again. `operation` is OpenTelemetry's name of what is asked for.
        Raises OutriderError: what `Router.pick` and `build` raise, and whatever the verifier reports.
        """
        pick = self.router.pick(model)
        # Sequences that move together to another replica are built for it once.
        built: Build = cache(build)
        count = len(built(pick.info))
        # They count as running from here on, so that requests that come together do not all pick the same replica.
        sequences = [_Sequence(self, operation, built, index, pick) for index in range(count)]
        try:
            async with aclosing(merge([sequence.deltas() for sequence in sequences])) as events:
                async for event in events:
                    yield event
        finally:
            for sequence in sequences:
                sequence.leave()


class _Sequence:
    """One sequence of a request, at the replica where it runs."""

    def __init__(self, generation: Generation, operation: str, built: Build, index: int, pick: Pick) -> None:
        self._generation = generation
        self._operation = operation
        self._built = built
        self._index = index
        self._go_to(pick)

    def _go_to(self, pick: Pick) -> None:
        self._pick = pick
        self._request = self._built(pick.info)[self._index]
        pick.replica.sequences.add(self)

    def leave(self) -> None:
        """Count at the replica no more."""
        self._pick.replica.sequences.discard(self)

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """The sequence's text, to the last delta."""
        length = len(self._request.tokens.prompt)
        clock = SequenceClock(self._generation.metrics, self._pick.model, self._operation, length)
        builder: DeltaBuilder | None = None
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    # With its first chunk it is certain which replica's model the sequence has.
                    builder = builder or DeltaBuilder(self._request, self._pick.info, self._generation.table)
                    self._count(chunk, clock)
                    delta = builder.add(chunk)
                    if delta.finish is not None:
                        clock.finished(delta.finish.reason)
                    yield delta
                    if delta.finish is not None:
                        return
        except OutriderError as error:
            clock.failed(error.reason.name)
            if error.field is None or not error.field.startswith("grammar."):
                raise
            # The verifier knows the grammar by the wire's name, the caller by its own.
            name = self._request.grammar_field
            raise replace(error, message=error.message.replace(error.field, name), field=name) from error
        finally:
            clock.close()
            self.leave()

    async def _chunks(self) -> AsyncGenerator[TokenChunk, None]:
        """What the replica generates, or the next one when it is lost before the first chunk."""
        begun = False
        while True:
            tokens, info, replica = self._request.tokens, self._pick.info, self._pick.replica
            left = tokens.max_tokens
            try:
                async with aclosing(replica.tokens.generate(tokens)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        left = check_chunk(chunk, info, left, replica.address)
                        yield chunk
                raise OutriderError(Reason.VERIFIER_UNAVAILABLE, f"verifier {replica.address} ended without a finish reason")
            except OutriderError as error:
                if begun:
                    raise
                self.leave()
                self._go_to(self._generation.router.instead_of(self._pick, error))

    def _count(self, chunk: TokenChunk, clock: SequenceClock) -> None:
        """Count a chunk; one that gathers several steps leaves it to the last to say what became of their drafts."""
        if chunk.token_ids:
            clock.chunk(len(chunk.token_ids))
        gathered = self._request.tokens.min_chunk_tokens > 1
        counts: list[int] = []
        if gathered and chunk.stats is not None:
            counts = chunk.stats.histogram
        elif not gathered and chunk.draft_token_count:
            counts = [0] * chunk.sources.count(TokenSource.ACCEPTED) + [1]
        activity = self._generation.metrics.activity
        activity.add(chunk)
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
