"""Runs a request's sequences on the replica that is picked for it. Knows no HTTP and no gRPC."""

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
"""Checks what was asked for against a model and builds its sequences. Raises OutriderError."""


class Generation:
    """Generates text with the verifier's replicas."""

    def __init__(self, router: Router, prompts: Prompts, metrics: Metrics) -> None:
        self.router = router
        self.prompts = prompts
        self.metrics = metrics
        self.table = TokenTable(prompts.tokenizer)

    def echo(self, prompt: str | list[int], info: ModelInfo) -> str:
        """A prompt's text, as the answer repeats it. Raises OutriderError(INVALID_VALUE) for bad ids."""
        if isinstance(prompt, str):
            return prompt
        check_ids("prompt", prompt, info)
        return self.table.decode(prompt)

    async def generate(
        self, model: str, operation: str, build: Build
    ) -> AsyncGenerator[Event, None]:
        """The deltas of a request's sequences as they come. Closing the iterator cancels them all.

        The request is built for the model of one replica and runs there. A sequence that it loses
        before its first chunk moves to another one, and is checked and built again for that one.
        `operation` is OpenTelemetry's name of what is asked for. Raises OutriderError: what
        `Router.pick` and `build` raise, and whatever the verifier reports.
        """
        pick = self.router.pick(model)
        # Sequences that move together to another replica are built for it once.
        built: Build = cache(build)
        count = len(built(pick.info))
        # They count at once, or all requests that come together would pick the same replica.
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
    """One sequence of a request; it counts as running at its replica until `deltas` is over."""

    generation: Generation
    operation: str
    built: Build
    index: int
    pick: Pick

    def __post_init__(self) -> None:
        self.go_to(self.pick)

    def go_to(self, pick: Pick) -> None:
        """Run there, checked against its model."""
        self.pick, self.request = pick, self.built(pick.info)[self.index]
        pick.replica.sequences.add(self)

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """The sequence's text, to the last delta."""
        length = len(self.request.tokens.prompt)
        clock = SequenceClock(self.generation.metrics, self.pick.model, self.operation, length)
        builder: DeltaBuilder | None = None
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    if builder is None:
                        # From the first chunk on, the sequence stays where it is.
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
            # The verifier knows the grammar by the wire's name, the caller by its own.
            name = self.request.grammar_field
            message = error.message.replace(error.field, name)
            raise replace(error, message=message, field=name) from error
        finally:
            clock.close()
            self.pick.replica.sequences.discard(self)

    async def _chunks(self) -> AsyncGenerator[TokenChunk, None]:
        """What the replica generates, or the next one when it is lost before the first chunk."""
        begun = False
        while True:
            tokens, info, replica = self.request.tokens, self.pick.info, self.pick.replica
            left = tokens.max_tokens
            try:
                async with aclosing(replica.tokens.generate(tokens)) as chunks:
                    async for chunk in chunks:
                        begun = True
                        left = check_chunk(chunk, info, left, replica.address)
                        yield chunk
                message = f"verifier {replica.address} ended without a finish reason"
                raise OutriderError(Reason.VERIFIER_UNAVAILABLE, message)
            except OutriderError as error:
                if begun:
                    raise
                replica.sequences.discard(self)
                self.go_to(self.generation.router.instead_of(self.pick, error))


def check_chunk(chunk: TokenChunk, info: ModelInfo, left: int, address: str) -> int:
    """How many tokens may come after this chunk, when `left` might until now.

    Raises OutriderError(INTERNAL) for what no verifier of this model can say.
    """
    ids, listed = (
        chunk.token_ids,
        [
            chunk.token_ids,
            *(known.top_token_ids for known in (*chunk.logprobs, *chunk.prompt_logprobs)),
        ],
    )
    problem = ""
    if any(of_one and max(of_one) >= info.vocab_size for of_one in listed):
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
