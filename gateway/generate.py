"""Run a request's sequences on one of the verifier's replicas. Independent of HTTP and gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cache

from gateway.choices import Event, merge
from gateway.deltas import DeltaBuilder, TextDelta
from gateway.metrics import Metrics, SequenceClock
from gateway.prompts import Prompts
from gateway.request import TextRequest, check_ids
from gateway.routing import Pick, Router
from gateway.text import TokenTable
from outrider.errors import OutriderError, Reason
from outrider.limits import MAX_DRAFT_TOKENS
from outrider.messages import TokenChunk
from outrider.model_info import ModelInfo

Build = Callable[[ModelInfo], Sequence[TextRequest]]
"""Checks a request against a model and builds its sequences. Raises OutriderError."""


class Generation:
    """Generates text with the verifier's replicas."""

    def __init__(self, router: Router, prompts: Prompts, metrics: Metrics) -> None:
        self.router = router
        self.prompts = prompts
        self.metrics = metrics
        self.table = TokenTable(prompts.tokenizer)

    def echo(self, prompt: str | list[int], info: ModelInfo) -> str:
        """The prompt's text, for the answer to repeat. Raises OutriderError(INVALID_VALUE)."""
        if isinstance(prompt, str):
            return prompt
        check_ids("prompt", prompt, info)
        return self.table.decode(prompt)

    async def generate(
        self, model: str, operation: str, build: Build
    ) -> AsyncGenerator[Event, None]:
        """Yield the deltas of a request's sequences as they arrive.

        The request is built for the model of one replica and runs there. If the replica fails
        before a sequence's first chunk, the sequence is built again for another replica and
        moves there. Closing the iterator cancels all sequences. `operation` is OpenTelemetry's
        name of the operation. Raises OutriderError from `Router.pick`, from `build` and from
        the verifier.
        """
        pick = self.router.pick(model)
        # Build the request once for all sequences that move to the same replica.
        built: Build = cache(build)
        count = len(built(pick.info))
        # All sequences count as running from here on. Otherwise requests that arrive together
        # would all pick the same replica.
        sequences = [_Sequence(self, operation, built, index, pick) for index in range(count)]
        if count == 1:
            async with aclosing(sequences[0].deltas()) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        async with aclosing(merge([sequence.deltas() for sequence in sequences])) as events:
            async for event in events:
                yield event


@dataclass(eq=False)
class _Sequence:
    """One sequence of a request. It counts as running at its replica until `deltas` ends."""

    generation: Generation
    operation: str
    built: Build
    index: int
    pick: Pick

    def __post_init__(self) -> None:
        self.go_to(self.pick)

    def go_to(self, pick: Pick) -> None:
        """Check the request against the pick's model, and count as running at its replica."""
        self.pick = pick
        self.request = self.built(pick.info)[self.index]
        pick.replica.sequences.add(self)

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yield the sequence's deltas, and record its metrics."""
        length = len(self.request.tokens.prompt)
        tenant = self.request.tokens.tenant
        clock = SequenceClock(
            self.generation.metrics, self.pick.model, self.operation, length, tenant
        )
        builder: DeltaBuilder | None = None
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    if builder is None:
                        # The replica may have changed before, but does not from here on.
                        builder = DeltaBuilder(self.request, self.pick.info, self.generation.table)
                    clock.add(chunk, gathered=self.request.tokens.min_chunk_tokens > 1)
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
            # The verifier names the wire's field. Name the caller's field instead.
            name = self.request.grammar_field
            message = error.message.replace(error.field, name)
            raise replace(error, message=message, field=name) from error
        finally:
            clock.close()
            self.pick.replica.sequences.discard(self)

    async def _chunks(self) -> AsyncGenerator[TokenChunk, None]:
        """Yield the replica's chunks. If it fails before the first one, try another replica."""
        begun = False
        while True:
            tokens = self.request.tokens
            replica = self.pick.replica
            left = tokens.max_tokens
            try:
                async with aclosing(replica.tokens.generate(tokens)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        left = check_chunk(chunk, self.pick.info, left, replica.address)
                        yield chunk
                message = f"verifier {replica.address} ended without a finish reason"
                raise OutriderError(Reason.VERIFIER_UNAVAILABLE, message)
            except OutriderError as error:
                if begun:
                    raise
                replica.sequences.discard(self)
                self.go_to(self.generation.router.instead_of(self.pick, error))


def check_chunk(chunk: TokenChunk, info: ModelInfo, left: int, address: str) -> int:
    """Check a chunk against the model, and return how many tokens may follow it.

    `left` is how many tokens may come from this chunk on. Raises OutriderError(INTERNAL) for a
    chunk that no verifier of this model can send.
    """
    ids = chunk.token_ids
    id_lists = [known.top_token_ids for known in (*chunk.logprobs, *chunk.prompt_logprobs)]
    problem = ""
    if any(listed and max(listed) >= info.vocab_size for listed in (ids, *id_lists)):
        problem = f"a token id that is not in [0, {info.vocab_size})"
    elif len(ids) > left:
        problem = "more tokens than it was asked for"
    elif len(chunk.sources) != len(ids) or (chunk.logprobs and len(chunk.logprobs) != len(ids)):
        problem = "tokens without a source or a log probability each"
    elif chunk.stats is not None and len(chunk.stats.histogram) > MAX_DRAFT_TOKENS + 1:
        problem = f"an acceptance histogram of {len(chunk.stats.histogram)} entries"
    if problem:
        raise OutriderError(Reason.INTERNAL, f"verifier {address} sent {problem}")
    return left - len(ids)
