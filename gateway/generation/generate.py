"""Runs a request's sequences on a verifier's replicas, for HTTP and gRPC alike."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache

from gateway.generation.admission import Admission, AdmissionSlots
from gateway.generation.key_slots import KeySlots
from gateway.generation.tenant_semaphore import AT_ONCE, OF_A_TENANT, TenantSemaphore
from gateway.metrics import GatewayMetrics, SequenceClock
from gateway.text.choices import Event, merge
from gateway.text.deltas import DeltaBuilder, TextDelta
from gateway.text.prompts import Prompts
from gateway.text.request import TextRequest, check_ids
from gateway.text.token_table import TokenTable
from gateway.upstream.chunk_checks import check_chunk
from gateway.upstream.replica import Replica
from gateway.upstream.routing import RETRYABLE, Pick, Router
from gateway.upstream.verifier_stream import VerifierStream, late
from outrider.errors import OutriderError, Reason
from outrider.process.observability import telemetry
from outrider.protocol.messages import TokenChunk, TokenRequest
from outrider.protocol.model_info import ModelInfo

log = logging.getLogger(__name__)

# A request that makes verifiers crash must not crash all of them, even if each writes some tokens
# before its crash. A request that every verifier refuses must not be sent over and over.
_MOST_LOST = 4
# The sequences of a request that are sent in one round of the event loop have at most about this
# many tokens of prompts and predictions together. Writing a token into a message takes 30 ns.
_REQUEST_TOKENS_AT_ONCE = 400_000
# The name of the call that carries a gateway's sequences, for their spans.
_METHOD = "outrider.internal.v1.TokenStreamService/StreamTokens"
# gRPC ends calls by its own clock, perhaps slightly before our deadline. So a sequence that is
# cancelled less than this time before the deadline counts as late.
_EARLY_S = 0.1

# A client may leave an answer unread for this long after the buffers are full. Meanwhile the answer
# has no part in the verifier's steps, and no slot. After this time the answer ends with
# slow_reader. A client that still reads from time to time loses nothing, and the buffers of a
# client that is gone are freed soon.
_UNREAD_S = 60.0

Build = Callable[[ModelInfo], Sequence[TextRequest]]
"""Checks a request against a model and builds its sequences. Raises OutriderError."""


class Generation:
    """Generates text with the verifier's replicas."""

    def __init__(
        self,
        router: Router,
        prompts: Prompts,
        metrics: GatewayMetrics,
        resume_seconds: float,
        patience_seconds: float = 0.0,
    ) -> None:
        """Make a Generation.

        A sequence that has started and has lost its verifier waits for at most `resume_seconds` for
        a verifier to continue it. `patience_seconds` is the timeout of callers that name no
        timeout, see `Admission`.
        """
        self.router = router
        self.prompts = prompts
        self.metrics = metrics
        self.resume_seconds = resume_seconds
        self.admission = Admission(router, metrics, patience_seconds)
        self.key_slots = KeySlots()
        self.preparing = TenantSemaphore(AT_ONCE, OF_A_TENANT)
        self.table = TokenTable(prompts.tokenizer)

    def echo(self, prompt: str | list[int], info: ModelInfo) -> str:
        """Return the prompt's text, for the answer to repeat.

        If the ids end within a character, the text leaves that character out: the generated text
        begins with it. Raises OutriderError(INVALID_VALUE) for ids that the model does not have.
        """
        if isinstance(prompt, str):
            return prompt
        check_ids("prompt", prompt, info)
        shown = [token for token in prompt if not self.table.is_special(token)]
        return self.table.decode(shown[: self.table.whole_characters(shown)])

    async def generate(
        self,
        model: str,
        operation: str,
        build: Build,
        admitted: AdmissionSlots,
        prefixes: Sequence[bytes] = (),
    ) -> AsyncGenerator[Event, None]:
        """Yield the deltas of a request's sequences as they arrive.

        The request is built for the model of one replica and runs there. If the replica fails or
        leaves, each sequence goes on at another replica. A sequence that has got no chunk yet is
        built again for the other replica's model. Closing the iterator cancels all sequences.
        `operation` is OpenTelemetry's name of the operation, and `prefixes` are the hashes of the
        first prompt's prefixes. When a sequence ends, its slot in `admitted` is released. At the
        deadline of `admitted`, the sequences that still run end with DEADLINE_EXCEEDED.
        Raises OutriderError from `Router.pick`, from `build` and from the verifier.
        """
        sequences: list[_Sequence] = []
        try:
            pick = self.router.pick(model, prefixes)
            # Build the request once for all sequences that move to the same replica.
            built: Build = cache(build)
            # All sequences count as running from here on. If they counted later, requests that
            # arrive together would all pick the same replica.
            tokens = [request.tokens for request in built(pick.info)]
            for index in range(len(tokens)):
                sequence = _Sequence(self, operation, built, index, pick, admitted, prefixes)
                sequences.append(sequence)
            streams = [sequence.deltas() for sequence in sequences]
            longest = max(len(each.prompt) + len(each.prediction) for each in tokens)
            at_once = max(1, _REQUEST_TOKENS_AT_ONCE // max(1, longest))
            events = merge(streams, at_once) if len(streams) > 1 else _only(streams[0])
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            for sequence in sequences:
                sequence.leave()


async def _only(stream: AsyncGenerator[TextDelta, None]) -> AsyncGenerator[Event, None]:
    """Yield the events of a single stream."""
    async with aclosing(stream):
        async for delta in stream:
            yield 0, delta


class _Sequence:
    """One sequence of a request. The sequence counts as running at its replica until `deltas` ends.

    Prompt, committed tokens and seed are all that another replica needs to continue it.
    """

    def __init__(
        self,
        generation: Generation,
        operation: str,
        built: Build,
        index: int,
        pick: Pick,
        admitted: AdmissionSlots,
        prefixes: Sequence[bytes],
    ) -> None:
        self._generation = generation
        self._operation = operation
        self._built = built
        self._index = index
        self._pick = pick
        self._admitted = admitted
        self._prefixes = prefixes
        self._left = False
        # True if the sequence has no slot, because the verifier does nothing for it.
        self._is_unread = False
        self._builder: DeltaBuilder | None = None
        # If the request has no seed, every replica draws with this seed.
        self._noise_seed = secrets.randbits(64)
        self._committed: list[int] = []
        # The number of prompt tokens whose log probabilities have arrived, and how many of these
        # log probabilities the present replica has still to repeat.
        self._scored = 0
        self._scored_again = 0
        self._lost_count = 0
        # Each new token resets these two values: the number of refusals by replicas, and the time
        # at which the sequence stops waiting for a replica. A refusal for a full queue counts only
        # after this time.
        self._refused_count = 0
        self._deadline: float | None = None
        self._go_to(pick)

    def _go_to(self, pick: Pick) -> None:
        """Count the sequence as running at the pick's replica.

        Before the first chunk, the request is built for that replica's model, and checked.
        """
        if self._builder is None:
            self._request = self._built(pick.info)[self._index]
        self._pick.replica.sequences.discard(self)
        self._pick = pick
        pick.replica.sequences.add(self)

    def leave(self) -> None:
        """Stop counting the sequence as running."""
        self._pick.replica.sequences.discard(self)
        if not self._left:
            self._left = True
            if not self._is_unread:
                self._admitted.release()
            self._count_unread(False)

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yield the sequence's deltas, and record its metrics."""
        tokens = self._request.tokens
        metrics = self._generation.metrics
        length = len(tokens.prompt)
        clock = SequenceClock(metrics, self._pick.model, self._operation, length, tokens.tenant)
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    if self._builder is None:
                        table = self._generation.table
                        self._builder = DeltaBuilder(self._request, self._pick.info, table)
                    clock.add(chunk, coalesced=self._request.tokens.min_chunk_tokens > 1)
                    delta = self._builder.add(chunk)
                    if delta.finish is not None:
                        clock.finished(delta.finish.reason)
                    yield delta
                    if delta.finish is not None:
                        return
        except OutriderError as error:
            clock.failed(error.reason.name)
            if error.field is None or not error.field.startswith("grammar."):
                raise
            # The verifier's error names a field of the message to the verifier. The gateway's error
            # names the corresponding field of the caller's request.
            name = self._request.grammar_field
            message = error.message.replace(error.field, name)
            raise replace(error, message=message, field=name) from error
        finally:
            clock.close(is_late=time.monotonic() > self._admitted.ends_at - _EARLY_S)
            self.leave()

    async def _chunks(self) -> AsyncGenerator[TokenChunk, None]:
        """Yield the replica's chunks, and if it fails, the chunks of replicas that continue."""
        while True:
            replica = self._pick.replica
            stream = replica.tokens
            try:
                async with aclosing(self._chunks_of(replica, stream)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except OutriderError as error:
                if error.reason in RETRYABLE or error.reason is Reason.OVERLOADED:
                    replica.mark_suspect(stream, error)
                if not self._moves(error.reason):
                    raise
                self._set_unread(False)
                await self._fail_over(error)

    async def _chunks_of(
        self, replica: Replica, stream: VerifierStream
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield the chunks of one replica, in a separate span. Raises OutriderError."""
        info = self._pick.info
        span = telemetry.start(
            "generate_tokens",
            self._request.tokens.traceparent,
            kind=telemetry.Kind.CLIENT,
            rpc__system__name="grpc",
            rpc__method=_METHOD,
            server__address=replica.address,
        )
        ends_at = self._admitted.ends_at
        rest = self._rest(span.traceparent)
        answer = stream.generate(rest, ends_at, _UNREAD_S, self._set_unread)
        try:
            async with aclosing(answer) as chunks:
                async for chunk in chunks:
                    left = self._request.tokens.max_tokens - len(self._committed)
                    check_chunk(chunk, info, left, replica.address)
                    yield self._taken(chunk)
            message = "the verifier ended an answer without a finish reason"
            raise OutriderError(Reason.VERIFIER_UNAVAILABLE, message)
        except OutriderError as error:
            span.ended_by(error)
            raise
        finally:
            span.end()

    def _set_unread(self, is_unread: bool) -> None:
        """Release the slot while the verifier has nothing to do for the sequence.

        The verifier has nothing to do while the client does not read, and after the verifier has
        ended the answer. So a client that reads nothing cannot keep the slot.
        """
        if is_unread == self._is_unread:
            return
        if is_unread:
            self._admitted.release()
        else:
            self._admitted.acquire_again()
        self._count_unread(is_unread)

    def _count_unread(self, is_unread: bool) -> None:
        change = int(is_unread) - int(self._is_unread)
        self._is_unread = is_unread
        self._pick.replica.unread_count += change
        self._generation.metrics.unread.labels(self._pick.model).inc(change)

    def _rest(self, traceparent: str) -> TokenRequest:
        """Return the request for the tokens that are still missing, with this `traceparent`."""
        tokens = replace(self._request.tokens, traceparent=traceparent)
        if self._committed:
            tokens = replace(tokens, committed=self._committed, prompt_logprobs=None)
        self._scored_again = self._scored
        fingerprint = self._pick.info.model_fingerprint
        return replace(tokens, noise_seed=self._noise_seed, model_fingerprint=fingerprint)

    def _taken(self, chunk: TokenChunk) -> TokenChunk:
        """Keep the chunk's tokens, in case another replica must continue the sequence.

        Return the chunk without those of the prompt's log probabilities that have arrived before.
        """
        if chunk.token_ids:
            self._committed += chunk.token_ids
            self._refused_count = 0
            self._deadline = None
        if not chunk.prompt_logprobs:
            return chunk
        new = chunk.prompt_logprobs[self._scored_again :]
        self._scored_again -= len(chunk.prompt_logprobs) - len(new)
        self._scored += len(new)
        return replace(chunk, prompt_logprobs=new)

    def _moves(self, reason: Reason) -> bool:
        """Return whether the sequence goes to another replica after an error.

        If a full queue refused the sequence, it goes to another replica in two cases: if it has
        started, since it was accepted once, and if another replica has room for it.
        """
        if reason is not Reason.OVERLOADED:
            return reason in RETRYABLE
        picks = self._generation.router.ready_picks(self._pick.model)
        return self._builder is not None or not all(pick.busyness()[0] for pick in picks)

    async def _fail_over(self, error: OutriderError) -> None:
        """Go to a ready replica after `error`.

        Raises OutriderError if there is none, or after more than `_MOST_LOST` losses or refusals.

        A sequence that has got a chunk waits for a replica. A sequence without a chunk does not
        wait, since its caller has received nothing and can ask again.
        """
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._generation.resume_seconds
        if error.reason is Reason.VERIFIER_UNAVAILABLE:
            self._lost_count += 1
        elif error.reason is not Reason.OVERLOADED or now > self._deadline:
            self._refused_count += 1
        if max(self._lost_count, self._refused_count) > _MOST_LOST:
            raise error
        router = self._generation.router
        if self._builder is None:
            self._go_to(await router.pick_fallback(self._pick, error))
            router.sent.note(self._prefixes, self._pick.replica.address)
            return
        tokens = self._request.tokens
        length = len(tokens.prompt) + tokens.max_tokens
        wait_s = max(0.0, min(self._deadline, self._admitted.ends_at) - now)
        try:
            pick = await router.pick_fallback(self._pick, error, wait_s, length)
        except OutriderError as found_none:
            if time.monotonic() >= self._admitted.ends_at:
                raise late() from found_none
            if found_none.reason is Reason.MODEL_CHANGED:
                raise
            waited = f"no verifier went on with it for {self._generation.resume_seconds:g} s"
            raise OutriderError(
                found_none.reason,
                f"{found_none.message}; {waited}",
                retry_after_s=found_none.retry_after_s,
            ) from found_none
        self._go_to(pick)
        router.sent.note(self._prefixes, pick.replica.address)
        self._builder.resumed()
        model, _, replica = self._pick
        self._generation.metrics.resumed.labels(model, error.reason.name.lower()).inc()
        count = len(self._committed)
        log.info("a sequence goes on at %s after %d tokens: %s", replica.address, count, error)
