"""The clients of a simulation: who asks for what when, of which verifier, and what they got."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from bench.simulator.events import Events
from bench.simulator.scenario import Scenario
from bench.simulator.verifier import VerifierActor
from bench.simulator.world import FIRST_MARK, Text, World
from outrider.errors import OutriderError
from outrider.messages import SamplingParams, SpeculationOptions, TokenChunk, TokenRequest
from verifier_svc.state.sequence import Sequence


class RecordedRequest(BaseModel):
    """A line of a recording."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    time: float = Field(0.0, ge=0)
    """Seconds at which it comes; has no meaning with closed arrivals."""
    prompt_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    kind: str = ""
    guesses: dict[str, Annotated[str, StringConstraints(pattern=r"^[+.1-9-]*$")]] = Field(
        default_factory=dict
    )
    """By drafter, a character for each token of the output: + where the drafter guesses it behind the tokens before it, - where
    it guesses another one (or 1 to 9 where the token is that alternative to its guess, for `drafts_by: model`), and . where it has
    no guess. Such a drafter's acceptance has no meaning."""
    prompt_ids: list[int] = Field(default_factory=list)
    """The prompt's tokens; drafters that look up need them and the next."""
    output_ids: list[int] = Field(default_factory=list)
    """The target's tokens behind the prompt. They may be more than `output_tokens`, so that drafts beyond the end are known."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.prompt_ids and len(self.prompt_ids) != self.prompt_tokens:
            raise ValueError(
                f"prompt_ids must be {self.prompt_tokens}, as prompt_tokens says, not {len(self.prompt_ids)}"
            )
        if self.prompt_ids and len(self.output_ids) < self.output_tokens:
            raise ValueError(
                f"output_ids must be at least {self.output_tokens}, as output_tokens says"
            )
        return self


@dataclass(eq=False, slots=True)
class Request:
    """One client's request and what came of it. Times are in seconds."""

    text: Text
    sent_at: float
    verifier: VerifierActor
    received: list[int] = field(default_factory=list)
    received_at: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""
    sequence: Sequence | None = None
    error: OutriderError | None = None
    over: bool = False


class Traffic:
    """Sends requests to the verifier that has the fewest, by the scenario's law."""

    def __init__(
        self,
        events: Events,
        scenario: Scenario,
        load: int,
        world: World,
        verifiers: dict[str, VerifierActor],
        speculates: bool,
    ) -> None:
        """`load` requests are kept under way where arrivals are closed; drafters are used only if it `speculates`."""
        self.requests: list[Request] = []
        self.resubmitted_count = 0
        self.full_until = 0.0
        """Until when as many requests were under way as there should be."""
        self._events = events
        self._scenario = scenario
        self._load = load
        self._world = world
        self._verifiers = verifiers
        self._speculates = speculates
        self._numbers = count()
        self._lengths = world.random("lengths")
        # The marks of recorded prompts: equal prompts have equal marks.
        self._marks: dict[tuple[int, ...], int] = {}
        self._recording = (
            [] if scenario.recording is None else [*read_recording(scenario.recording)]
        )
        self._warm_up = min(scenario.warm_up, len(self._recording))
        # Clients that wait for the end of the warming up.
        self._waiting = 0
        self.on_measured: Callable[[], object] = lambda: None
        """Called when the first request that is measured is about to be sent."""
        self.began = 0.0
        """When that was."""
        self._latency_s = scenario.client_ms / 1000
        self._stopped = False

    def begin(self) -> None:
        """Let the first requests come."""
        if self._warm_up:
            for _ in range(self._load):
                self._warm()
        else:
            self._measure()

    @property
    def measured(self) -> list[Request]:
        """The requests behind those that warm up."""
        return self.requests[self._warm_up :]

    def _warm(self) -> None:
        """A client sends the next request that warms up, or waits for the others; the last one begins what is measured."""
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
            for number, recorded in enumerate(self._recording[self._warm_up :], self._warm_up):
                send = partial(self._send, self._recorded_text(number, recorded))
                self._events.at(self.began + recorded.time, send)
        else:
            self._arrivals = self._world.random("arrivals")
            self._poisson()

    def stop(self) -> None:
        """Send no more, and give up what is under way."""
        self._stopped = True
        for request in self.requests:
            if not request.over:
                self._cancel(request)

    def move_from(self, verifier: VerifierActor) -> None:
        """A verifier is gone: its requests go to others, which continue them."""
        for request in self.requests:
            if request.verifier is verifier and not request.over:
                self.resubmitted_count += 1
                self._submit(request)

    @property
    def all_over(self) -> bool:
        return all(request.over for request in self.requests)

    # --- new requests ---

    def _next(self) -> None:
        """A client of closed arrivals sends its next request, if there is one."""
        waves = self._scenario.waves
        total = len(self._recording) or (None if waves is None else waves * self._load)
        if total is None or len(self.requests) < total:
            self._send(self._text())
        elif self.full_until == 0.0:
            self.full_until = self._events.now

    def _poisson(self) -> None:
        self._events.after(self._arrivals.expovariate(self._scenario.rate), self._arrive)

    def _arrive(self) -> None:
        if not self._stopped:
            self._send(self._text())
            self._poisson()

    def _text(self) -> Text:
        scenario, number = self._scenario, next(self._numbers)
        if self._recording:
            return self._recorded_text(number, self._recording[number])
        prompt, output = (
            self._lengths.randint(law[0], law[-1])
            for law in (scenario.prompt_tokens, scenario.output_tokens)
        )
        return Text(number, scenario.kinds[number % len(scenario.kinds)], prompt, output)

    def _recorded_text(self, number: int, recorded: RecordedRequest) -> Text:
        prompt = recorded.prompt_ids
        if prompt:
            number = self._marks.setdefault(tuple(prompt), FIRST_MARK + len(self._marks))
        text = Text(
            number,
            recorded.kind,
            recorded.prompt_tokens,
            recorded.output_tokens,
            recorded.guesses,
            prompt_ids=prompt,
        )
        text.tokens = [*recorded.output_ids]
        text.hard = [False] * len(text.tokens)
        return text

    def _send(self, text: Text) -> None:
        if self._stopped:
            return
        self._world.add(text)
        request = Request(text, self._events.now, self._least_loaded())
        self.requests.append(request)
        self._submit(request)

    def _least_loaded(self) -> VerifierActor:
        serving = [verifier for verifier in self._verifiers.values() if verifier.serving]
        if not serving:
            raise ValueError(f"schedule: no verifier is left at {self._events.now} s")
        return min(serving, key=lambda verifier: verifier.open_requests)

    # --- one request ---

    def _submit(self, request: Request) -> None:
        """Have a verifier write what is missing."""
        text, received = request.text, request.received
        verifier = request.verifier = self._least_loaded()
        verifier.open_requests += 1
        wanted = TokenRequest(
            [*text.prompt, *received],
            text.output_length - len(received),
            SamplingParams(temperature=0.0, seed=text.number),
            ignore_eos=True,
            speculation=SpeculationOptions(enabled=self._speculates),
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
        def hear(message: TokenChunk | OutriderError) -> None:
            if request.over or request.verifier is not verifier:
                return
            arrival = self._events.now + self._latency_s
            if isinstance(message, OutriderError):
                request.error = message
                self._events.at(arrival, lambda: self._end(request))
                return
            request.received += message.token_ids
            request.received_at.append((arrival, len(message.token_ids)))
            if message.finish_reason is not None:
                self._events.at(arrival, lambda: self._end(request))

        return hear

    def _end(self, request: Request) -> None:
        request.over = True
        request.verifier.open_requests -= 1
        if self._stopped:
            return
        if request in self.requests[: self._warm_up]:
            self._events.after(self._latency_s, self._warm)
        elif self._scenario.arrivals == "closed":
            self._events.after(self._latency_s, self._next)

    def _cancel(self, request: Request) -> None:
        request.over = True

        def cancel() -> None:
            if request.sequence is not None:
                request.verifier.engine.cancel(request.sequence)

        # Behind its submission, which may be under way.
        self._events.after(self._latency_s, lambda: request.verifier.post(cancel))


def read_recording(path: Path) -> Iterator[RecordedRequest]:
    """The requests of a file; raises ValueError, which names the line, for what is none."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                yield RecordedRequest.model_validate(json.loads(line))
            except ValueError as error:
                raise ValueError(f"recording: line {number} of {path}: {error}") from error
