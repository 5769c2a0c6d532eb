"""Runs a drafter for one or several verifiers, with an independent draft stream for each.

Examples and drafters of your own call `serve`, which runs a whole process around a strategy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
from collections.abc import Sequence

from outrider.drafter.dialled import Dialled
from outrider.drafter.strategy import Guess, GuessStrategy, Strategy
from outrider.drafter.stream import DraftStream, Observer
from outrider.errors import OutriderError
from outrider.process import telemetry
from outrider.process.tls import Tls
from outrider.protocol.draft_messages import Hello
from outrider.protocol.model_info import ModelInfo, Placement

log = logging.getLogger(__name__)


def serve(
    draft: Guess | type[Strategy],
    *,
    name: str,
    verifier: str | Sequence[str] = "127.0.0.1:50051",
    drafter_id: str | None = None,
    tokenizer_fingerprint: str = "",
    tls: Tls | None = None,
) -> None:
    """Draft for one or several verifiers until SIGTERM or SIGINT; reconnects after restarts.

    `draft` is a function (text, count) → tokens, or a Strategy class; each connection makes an
    instance. `name` is the family's name in requests and metrics. `drafter_id` defaults to name,
    host and process id. `tokenizer_fingerprint` defaults to the verifier's own, for drafters that
    work with any ids. `tls` has the files of mutual TLS, which verifiers with TLS require; the
    drafter's id then begins with the common name of its certificate.

    Exits with status 1 and a message when every verifier refuses this drafter for good.
    """
    telemetry.setup_logging("info")
    verifiers = [verifier] if isinstance(verifier, str) else list(verifier)
    try:
        asyncio.run(_serve(draft, name, verifiers, drafter_id, tokenizer_fingerprint, tls))
    except OutriderError as error:
        raise SystemExit(f"drafter: {error}") from error


async def _serve(
    draft: Guess | type[Strategy],
    name: str,
    verifiers: list[str],
    drafter_id: str | None,
    fingerprint: str,
    tls: Tls | None,
) -> None:
    identity = own_id(drafter_id or f"{name}-{platform.node()}-{os.getpid()}", tls)

    def hello(strategy: Strategy, info: ModelInfo) -> Hello:
        return Hello(
            drafter_id=identity,
            family=name,
            tokenizer_fingerprint=fingerprint or info.tokenizer_fingerprint,
            max_draft_tokens=strategy.max_draft_tokens,
            distributions=strategy.distributions,
            feature_request=strategy.feature_request,
            placement=Placement(
                "local", platform.node(), strategy.device, architecture=platform.machine()
            ),
        )

    def stream(verifier: str) -> DraftStream:
        return DraftStream(
            Dialled(lambda: verifier, tls), lambda info: _strategy(draft, name), hello, Observer()
        )

    streams = DraftStreams([(verifier, stream(verifier)) for verifier in verifiers])
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, streams.stop)
    await streams.run()


class DraftStreams:
    """Serves several verifiers and reconnects when a verifier restarts; `stop` ends all streams."""

    def __init__(self, streams: Sequence[tuple[str, DraftStream]]) -> None:
        """`streams` holds (verifier's name, stream) pairs; log lines and errors use the names."""
        self._streams = streams
        self._refusals: list[tuple[str, OutriderError]] = []

    def stop(self) -> None:
        """Say goodbye to all verifiers and end `run`."""
        for _, stream in self._streams:
            stream.stop()

    async def run(self) -> None:
        """Serve until `stop`, or until every verifier has refused this drafter for good.

        Raises OutriderError with all reasons in the second case. An exception of one of the
        strategy's `fatal` types ends all streams.
        """
        tasks = [asyncio.create_task(self._run(name, stream)) for name, stream in self._streams]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if len(self._refusals) == len(self._streams):
            _, first = self._refusals[0]
            if len(self._streams) == 1:
                raise first
            reasons = "; ".join([f"{name}: {error}" for name, error in self._refusals])
            raise OutriderError(first.reason, f"every verifier refuses this drafter: {reasons}")

    async def _run(self, name: str, stream: DraftStream) -> None:
        try:
            await stream.run()
        except OutriderError as error:
            self._refusals.append((name, error))
            if len(self._streams) > 1:
                log.error("%s refuses this drafter for good: %s", name, error)


def own_id(wanted: str, tls: Tls | None) -> str:
    """A drafter's id. With TLS it begins with the certificate's common name and a slash.

    Raises OutriderError(INVALID_VALUE) if the certificate has no common name.
    """
    if tls is None:
        return wanted
    name = tls.common_name()
    return wanted if wanted == name or wanted.startswith(f"{name}/") else f"{name}/{wanted}"


def _strategy(draft: Guess | type[Strategy], name: str) -> Strategy:
    if not isinstance(draft, type):
        return GuessStrategy(draft, name)
    strategy: Strategy = draft()
    return strategy
