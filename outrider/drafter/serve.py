"""Runs a whole drafter process around a strategy. Examples and drafters of your own call it."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
from collections.abc import Sequence

from outrider.drafter.strategy import Guess, GuessStrategy, Strategy
from outrider.drafter.stream import DraftStream, Observer
from outrider.drafter.streams import DraftStreams
from outrider.process import telemetry
from outrider.process.tls import Tls
from outrider.protocol.draft_messages import Hello
from outrider.protocol.errors import OutriderError
from outrider.protocol.model_info import ModelInfo, Placement


def serve(
    draft: Guess | type[Strategy],
    *,
    name: str,
    verifier: str | Sequence[str] = "127.0.0.1:50051",
    drafter_id: str | None = None,
    tokenizer_fingerprint: str = "",
    tls: Tls | None = None,
) -> None:
    """Draft for one or several verifiers until SIGTERM or SIGINT; reconnects when one restarts.

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
            placement=Placement(
                "local", platform.node(), strategy.device, architecture=platform.machine()
            ),
        )

    def stream(verifier: str) -> DraftStream:
        return DraftStream(
            lambda: verifier, lambda info: _strategy(draft, name), hello, Observer(), tls=tls
        )

    streams = DraftStreams([(verifier, stream(verifier)) for verifier in verifiers])
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, streams.stop)
    await streams.run()


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
