"""Runs a drafter against the scripted verifier, plays the scenes, and reports broken rules."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from google.rpc import status_pb2
from rich.console import Console
from rich.progress import track

from outrider.conformance.report import table
from outrider.conformance.rules import RULES, Outcome, Result
from outrider.conformance.scenes import SCENES
from outrider.conformance.scripted_verifier import (
    Broken,
    KitsVerifier,
    Link,
    reason_in,
    refused,
    refused_for_a_later_reason,
)
from outrider.errors import Reason, Retry
from outrider.process.security.tls import Tls
from outrider.v1 import verifier_pb2

HIDDEN_SIZE = 16
"""The number of values in a hidden state; a caller may give the target's number."""
_START_S = 60.0
_BACK_S = 8.0
_EXIT_S = 5.0


class Kit:
    """One drafter under test, and the result of each rule."""

    def __init__(
        self,
        command: Sequence[str],
        fingerprint: str,
        vocab_size: int,
        tls: Tls | None = None,
        hidden_size: int = HIDDEN_SIZE,
    ) -> None:
        self.results = {name: Result() for name in RULES}
        self.notes: dict[str, str] = {}
        """Maps a note's name to the note's first remark."""
        self.transcript: list[dict[str, Any]] = []
        self._command = command
        self._tls = tls
        model = verifier_pb2.GetModelResponse(
            model_id="conformance",
            stage=verifier_pb2.MODEL_STAGE_LOADING,
            stage_detail="the conformance kit tests whether the drafter waits",
            tokenizer_fingerprint=fingerprint,
            vocab_size=vocab_size,
            context_length=8192,
            max_draft_tokens=16,
        )
        self.verifier = KitsVerifier(model, self._complain, self.remark, self._note, hidden_size)
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""
        self._began = time.monotonic()

    # --- the interface for scenes ---

    async def link(self) -> Link:
        """Return the drafter's stream; start the process and wait for a new stream where needed.

        Raises Broken("comes-back") if the process exits, or if no stream comes within 8 s (within
        60 s if this call started the process).
        """
        if self._link is not None and not self._link.ended:
            return self._link
        seconds = _BACK_S
        if self._process is None:
            self._start()
            seconds = _START_S
        self._link = await self._first_link(seconds)
        if self._link is None:
            raise Broken("comes-back", self._why_absent(seconds))
        return self._link

    def passed(self, *rules: str) -> None:
        """Mark these rules as kept, unless they failed before."""
        for rule in rules:
            if self.results[rule].outcome is Outcome.NOT_SEEN:
                self.results[rule].outcome = Outcome.PASS

    def remark(self, name: str, reason: str) -> None:
        """Record a remark about behaviour that is allowed but useless.

        Each note keeps only its first remark.
        """
        self.notes.setdefault(name, reason)

    def _complain(self, rule: str, reason: str) -> None:
        result = self.results[rule]
        if result.outcome is not Outcome.FAIL:
            self.results[rule] = Result(Outcome.FAIL, reason)

    def _note(self, sender: str, message: dict[str, Any]) -> None:
        at = round(time.monotonic() - self._began, 3)
        self.transcript.append({"seconds": at, "from": sender, **message})

    # --- the run ---

    async def run(self) -> None:
        """Play all scenes; afterwards `results` and `transcript` have the outcome."""
        await self.verifier.start(tls=self._tls)
        self._address = f"127.0.0.1:{self.verifier.port}"
        try:
            if await self._arrives():
                await self._play()
                await self._leaves()
                await self._gives_up()
        finally:
            self._kill()
            await self.verifier.stop()

    async def _arrives(self) -> bool:
        """Wait for the first stream, which must not come before READY; return whether one came."""
        self._start()
        early = await self._first_link(1.5)
        self.verifier.model.stage = verifier_pb2.MODEL_STAGE_READY
        if early is not None:
            self._complain("waits-until-ready", "a stream came while GetModel said LOADING")
            self._link = early
        else:
            self._link = await self._first_link(_START_S)
        if self._link is None:
            self._complain("waits-until-ready", self._why_absent(_START_S))
            return False
        self.passed("waits-until-ready", "hello")
        return True

    async def _first_link(self, seconds: float) -> Link | None:
        """Return the next stream; None if none comes in time or the process has exited."""
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, 0.2)):
                    return await self.verifier.link()
            if self._process.poll() is not None:
                break
        return None

    def _why_absent(self, seconds: float) -> str:
        code = self._process.poll() if self._process is not None else None
        return f"no stream within {seconds:.0f} s" if code is None else f"exited with {code}"

    async def _play(self) -> None:
        console = Console(stderr=True)
        # Show a progress bar only if standard error is a terminal.
        silent = not console.is_terminal
        for scene in track(SCENES, "scenes", console=console, transient=True, disable=silent):
            self._note("kit", {"scene": scene.__name__})
            try:
                await scene(self)
            except Broken as broken:
                self._complain(*self._cause(broken))
                self.verifier.refusal = None
                # The next scene needs a stream in a clean state.
                self._kill()
                self._link = None
                while not self.verifier.streams.empty():
                    self.verifier.streams.get_nowait()

    def _cause(self, broken: Broken) -> tuple[str, str]:
        """Return the broken rule and the reason.

        If the rule asks for an answer, but the stream has ended, the broken rule is
        `keeps-the-stream`.
        """
        if not broken.ended or not broken.rule.startswith("answers-"):
            return broken.rule, broken.reason
        code = self._process.poll() if self._process else None
        state = "and the process still runs" if code is None else f"as the process exited: {code}"
        return "keeps-the-stream", f"{broken.reason}, {state}"

    async def _leaves(self) -> None:
        """Check that the drafter leaves politely on SIGTERM."""
        rule = "leaves-politely"
        try:
            link = await self.link()
        except Broken as broken:
            self._complain(rule, broken.reason)
            return
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        # Like every verifier, the scripted verifier ends the stream once the drafter half-closes.
        half_closed = await link.until(link.half_closed.is_set, _EXIT_S)
        code = await self._exit_code(_EXIT_S)
        if not link.draining:
            self._complain(rule, "the drafter sent no Draining")
        elif not half_closed and not link.half_closed.is_set():
            self._complain(rule, "the stream was not half-closed")
        elif code != 0:
            state = "still runs" if code is None else f"exited with {code}"
            self._complain(rule, f"the process {state} after {_EXIT_S:.0f} s")
        self.passed(rule)

    async def _gives_up(self) -> None:
        """Check that the drafter exits after each kind of final refusal."""
        await self._gives_up_after(refused(Reason.TOKENIZER_MISMATCH))
        await self._gives_up_after(refused_for_a_later_reason(Retry.NEVER))
        self.verifier.refuses_every_call = True
        await self._gives_up_after(refused(Reason.CERTIFICATE_NOT_ALLOWED))
        self.passed("gives-up")

    async def _gives_up_after(self, refusal: status_pb2.Status) -> None:
        self._kill()
        self.verifier.refusal = refusal
        before = len(self.verifier.attempts)
        self._start()
        code = None
        attempts = 0
        deadline = time.monotonic() + _START_S
        while code is None and attempts < 2 and time.monotonic() < deadline:
            code = await self._exit_code(0.2)
            attempts = len(self.verifier.attempts) - before
        problem = None
        if code is None:
            problem = f"still runs after {attempts} attempts"
        elif code == 0:
            problem = "exited with 0"
        elif attempts != 1:
            problem = f"called {attempts} times"
        if problem:
            self._complain("gives-up", f"{problem}, refused with {reason_in(refusal)}")

    # --- the process ---

    def _start(self) -> None:
        command = [part.replace("{address}", self._address) for part in self._command]
        self._process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)

    async def _exit_code(self, seconds: float) -> int | None:
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            return None

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    # --- the results ---

    @property
    def failed(self) -> list[str]:
        """The names of the broken rules."""
        return [name for name, result in self.results.items() if result.outcome is Outcome.FAIL]


def check_drafter(
    command: Sequence[str],
    *,
    fingerprint: str = "f" * 64,
    vocab_size: int = 4096,
    hidden_size: int = HIDDEN_SIZE,
    transcript: Path | None = None,
    certs: Path | None = None,
) -> int:
    """Check a drafter, print the results, and return 1 if the drafter broke a rule, else 0.

    `command` starts the drafter; {address} in it stands for the verifier's address. `transcript`
    is a file for all messages, one JSON object a line. With `certs`, a folder that `outrider certs`
    made, the verifier demands mutual TLS. Raises OutriderError(INVALID_VALUE) if the verifier's
    certificate, its key or the authority is missing from this folder.
    """
    tls = None
    if certs is not None:
        tls = Tls.of(certs / "verifier.pem", certs / "verifier.key", certs / "ca.pem")
    kit = Kit(command, fingerprint, vocab_size, tls, hidden_size)
    asyncio.run(kit.run())
    Console().print(table(kit.results, kit.notes))
    if transcript is not None:
        transcript.write_text("".join(json.dumps(line) + "\n" for line in kit.transcript))
    for name in kit.failed:
        print(f"{name}: {kit.results[name].reason}")
    for name, reason in kit.notes.items():
        print(f"note: {name}: {reason}")
    return int(bool(kit.failed))
