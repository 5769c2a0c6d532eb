"""The clients of a simulation: they send requests to verifiers and collect the answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from outrider.errors import OutriderError
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.protocol.messages import (
    SamplingParams,
    SpeculationOptions,
    SpeculationStats,
    TokenChunk,
    TokenRequest,
)
from outrider_bench.simulator.events import Events
from outrider_bench.simulator.gateway import GatewayActor
from outrider_bench.simulator.recorded import RecordedRequest
from outrider_bench.simulator.scenario import Scenario
from outrider_bench.simulator.verifier import VerifierActor
from outrider_bench.simulator.world import FIRST_MARK, DrawnText, World
from verifier_svc.state.sequence import Sequence

UNREAD_CHUNKS = 400
"""The number of chunks of an answer for which the buffers between client and verifier have room."""
# The grammar of every request that has one. Texts are recorded, so nothing is masked.
_GRAMMAR = Grammar(GrammarKind.JSON_OBJECT)
UNREAD_S = 60.0
"""The seconds that the gateway waits for a client that does not read."""


@dataclass(eq=False, slots=True)
class Request:
    """One client's request and its answer. Times are in seconds."""

    text: DrawnText
    sent_at: float
    verifier: VerifierActor
    received: list[int] = field(default_factory=list)
    received_at: list[tuple[float, int]] = field(default_factory=list)
    """The times at which tokens arrived, each with the number of tokens."""
    sequence: Sequence | None = None
    stats: SpeculationStats | None = None
    """The statistics from the verifier that ended the request."""
    error: OutriderError | None = None
    over: bool = False
    late: bool = False
    """True if the client gave up before the end, or did not read for too long."""


class Traffic:
    """Sends requests as the scenario's `arrivals` say, to the verifier with the fewest requests.

    Closed arrivals keep `load` requests in progress. `speculates` says whether requests use
    drafters.
    """

    def __init__(
        self,
        events: Events,
        scenario: Scenario,
        load: int,
        world: World,
        verifiers: dict[str, VerifierActor],
        speculates: bool,
    ) -> None:
        self.requests: list[Request] = []
        self.resubmitted_count = 0
        self.full_until = 0.0
        """When fewer than `load` requests were in progress for the first time; 0 until then."""
        self._events = events
        self._scenario = scenario
        self._load = load
        self._world = world
        self._verifiers = verifiers
        self._speculates = speculates
        self._numbers = count()
        self._lengths = world.random("lengths")
        # The marks that identify recorded prompts: equal prompts have equal marks.
        self._marks: dict[tuple[int, ...], int] = {}
        self._recording = scenario.recording or []
        self._warm_up = min(scenario.warm_up, len(self._recording))
        # The number of clients that wait for the end of the warm-up.
        self._waiting = 0
        self.on_measured: Callable[[], object] = lambda: None
        """Called before the first measured request is sent."""
        self.began = 0.0
        """The time at which the measurement began."""
        self._latency_s = scenario.client_ms / 1000
        self._gateway = GatewayActor(events, verifiers, scenario.timeout_seconds)
        self._stopped = False

    def begin(self) -> None:
        """Send the first requests."""
        if self._warm_up:
            for _ in range(self._load):
                self._warm()
        else:
            self._measure()

    @property
    def measured(self) -> list[Request]:
        """The requests after the warm-up."""
        return self.requests[self._warm_up :]

    def _warm(self) -> None:
        """Send a client's next warm-up request.

        If there is none, the client waits, and the last client to wait starts the measurement.
        """
        if len(self.requests) < self._warm_up:
            self._send(self._text())
            return
        self._waiting += 1
        if self._waiting == self._load and not self._stopped:
            self._measure()

    def _measure(self) -> None:
        scenario = self._scenario
        self.began = self._events.now
        self.on_measured()
        if scenario.arrivals == "closed":
            for _ in range(self._load):
                self._next()
        elif scenario.arrivals == "recorded":
            numbers = count(self._warm_up)
            for recorded in self._recording[self._warm_up :]:
                for _ in range(recorded.choices):
                    send = partial(self._send, self._recorded_text(next(numbers), recorded))
                    self._events.at(self.began + recorded.time, send)
        else:
            self._arrivals = self._world.random("arrivals")
            self._poisson()

    def stop(self) -> None:
        """Send no more requests, and cancel running requests."""
        self._stopped = True
        for request in self.requests:
            if not request.over:
                self._cancel(request)

    def move_from(self, verifier: VerifierActor) -> None:
        """Resubmit the requests of a lost verifier to other verifiers, which continue them."""
        for request in self.requests:
            if request.verifier is verifier and not request.over:
                self.resubmitted_count += 1
                self._submit(request)

    @property
    def all_over(self) -> bool:
        """True if all requests sent so far have ended."""
        return all(request.over for request in self.requests)

    # --- new requests ---

    def _next(self) -> None:
        """Send the next request of closed arrivals, if there is one."""
        total: float = len(self._recording)
        if total == 0:
            total = (self._scenario.waves or math.inf) * self._load
        if len(self.requests) < total:
            self._send(self._text())
        elif self.full_until == 0.0:
            self.full_until = self._events.now

    def _poisson(self) -> None:
        self._events.after(self._arrivals.expovariate(self._scenario.rate), self._arrive)

    def _arrive(self) -> None:
        if not self._stopped:
            self._send(self._text())
            self._poisson()

    def _text(self) -> DrawnText:
        scenario = self._scenario
        number = next(self._numbers)
        if self._recording:
            return self._recorded_text(number, self._recording[number])
        prompt = self._lengths.randint(scenario.prompt_tokens[0], scenario.prompt_tokens[-1])
        output = self._lengths.randint(scenario.output_tokens[0], scenario.output_tokens[-1])
        return DrawnText(number, scenario.kinds[number % len(scenario.kinds)], prompt, output)

    def _recorded_text(self, number: int, recorded: RecordedRequest) -> DrawnText:
        prompt = recorded.prompt_ids
        if prompt:
            number = self._marks.setdefault(tuple(prompt), FIRST_MARK + len(self._marks))
        text = DrawnText(
            number,
            recorded.kind,
            recorded.prompt_tokens,
            recorded.output_tokens,
            recorded.guesses,
            tenant=recorded.tenant,
            prompt_ids=prompt,
            reads=recorded.reads,
            grammar=_GRAMMAR if recorded.grammar else None,
        )
        text.tokens = [*recorded.output_ids]
        text.hard = [False] * len(text.tokens)
        return text

    def _send(self, text: DrawnText) -> None:
        if self._stopped:
            return
        self._world.add(text)
        request = Request(text, self._events.now, self._least_loaded())
        self.requests.append(request)
        try:
            self._gateway.enter(text.tenant)
        except OutriderError as error:
            request.error = error
            request.over = True
            self._events.after(error.retry_after_s or 0.0, self._after_end)
            return
        self._submit(request)
        if self._scenario.timeout_seconds is not None:
            self._events.after(self._scenario.timeout_seconds, partial(self._give_up, request))

    def _give_up(self, request: Request) -> None:
        if not request.over:
            request.late = True
            self._end(request)
            self._cancel(request)

    def _least_loaded(self) -> VerifierActor:
        serving = [verifier for verifier in self._verifiers.values() if verifier.serving]
        if not serving:
            raise ValueError(f"schedule: no verifier is left at {self._events.now} s")
        return min(serving, key=lambda verifier: verifier.open_requests)

    # --- one request ---

    def _submit(self, request: Request) -> None:
        """Submit a request, or its remaining part, to the least loaded verifier."""
        text = request.text
        received = request.received
        verifier = self._least_loaded()
        request.verifier = verifier
        verifier.open_requests += 1
        wanted = TokenRequest(
            [*text.prompt, *received],
            text.output_length - len(received),
            SamplingParams(temperature=0.0, seed=text.number),
            ignore_eos=True,
            speculation=SpeculationOptions(enabled=self._speculates),
            tenant=text.tenant,
            grammar=text.grammar,
        )

        def submit() -> None:
            try:
                request.sequence = verifier.engine.submit(wanted, self._sink(request, verifier))
            except OutriderError as error:
                self._sink(request, verifier)(error)

        self._events.after(self._latency_s, lambda: verifier.post(submit))

    def _sink(
        self, request: Request, verifier: VerifierActor
    ) -> Callable[[TokenChunk | OutriderError], None]:
        def receive(message: TokenChunk | OutriderError) -> None:
            if request.over or request.verifier is not verifier:
                return
            arrival = self._events.now + self._latency_s
            if isinstance(message, OutriderError):
                request.error = message
                self._events.at(arrival, lambda: self._end(request))
                return
            request.received += message.token_ids
            request.received_at.append((arrival, len(message.token_ids)))
            if not request.text.reads and len(request.received_at) == UNREAD_CHUNKS:
                self._events.at(arrival, lambda: self._pause(request))
            if message.finish_reason is not None:
                request.stats = message.stats
                self._events.at(arrival, lambda: self._end(request))

        return receive

    def _pause(self, request: Request) -> None:
        """Leave an unread sequence out of steps, and end it if it stays unread."""
        engine = request.verifier.engine
        sequence = request.sequence
        if sequence is not None and not request.over:
            request.verifier.post(lambda: engine.pause(sequence))
            self._events.after(UNREAD_S, partial(self._give_up, request))

    def _end(self, request: Request) -> None:
        if request.over:
            return
        request.over = True
        request.verifier.open_requests -= 1
        self._gateway.leave(request.text.tenant)
        if self._stopped:
            return
        if request in self.requests[: self._warm_up]:
            self._events.after(self._latency_s, self._warm)
        else:
            self._events.after(self._latency_s, self._after_end)

    def _after_end(self) -> None:
        if self._scenario.arrivals == "closed":
            self._next()

    def _cancel(self, request: Request) -> None:
        request.over = True

        def cancel() -> None:
            if request.sequence is not None:
                request.verifier.engine.cancel(request.sequence)

        # The submission may still be in transit; the cancellation arrives after it.
        self._events.after(self._latency_s, lambda: request.verifier.post(cancel))
