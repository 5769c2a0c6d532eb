"""Runs a drafter for one or several verifiers, with an independent draft stream for each.

Examples and drafters of your own call `serve`, which runs a whole process around a strategy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
from collections.abc import Awaitable, Callable, Sequence

from outrider.drafter.grpc_transport import Dialled
from outrider.drafter.strategy import Guess, GuessStrategy, Strategy
from outrider.drafter.stream import DraftStream, Observer
from outrider.errors import OutriderError
from outrider.process.network.addresses import Addresses, check_address
from outrider.process.observability import telemetry
from outrider.process.security.tls import Tls
from outrider.process.tasks import until_first_end
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
    """Draft for one or several verifiers until SIGTERM or SIGINT; reconnect when one restarts.

    A `verifier` is host:port, unix:/path, or dns:NAME:PORT for all addresses that NAME has at any
    moment. `draft` is a function (text, count) → tokens, or a Strategy class; each connection makes
    an instance of the class. `name` is the family's name in requests and metrics. `drafter_id`
    defaults to name, host and process id. `tokenizer_fingerprint` defaults to the verifier's own,
    for drafters that work with any ids. `tls` has the files of mutual TLS, which verifiers with TLS
    require; the drafter's id then begins with the common name of its certificate.

    Exits with status 1 and a message when every verifier refuses this drafter for good, unless a
    `dns:` address may still bring further verifiers. Raises ValueError for an invalid `dns:`
    address.
    """
    telemetry.setup_logging("info")
    verifiers = [verifier] if isinstance(verifier, str) else list(verifier)
    for address in verifiers:
        check_address(address)
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
            requires_grammar=strategy.requires_grammar,
            weights_version=strategy.weights_version,
            placement=Placement(
                "local",
                platform.node(),
                strategy.device,
                architecture=platform.machine(),
                gpu_uuid=strategy.gpu_uuid,
            ),
        )

    def stream(verifier: str) -> DraftStream:
        return DraftStream(
            Dialled(lambda: verifier, tls), lambda info: _strategy(draft, name), hello, Observer()
        )

    streams = DraftStreams(Addresses(verifiers), stream)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, streams.stop)
    await streams.run()


class DraftStreams:
    """Serves several verifiers and reconnects when a verifier restarts; `stop` ends all streams.

    The verifiers of a `dns:` address come and go with the addresses of its name.
    """

    def __init__(self, addresses: Addresses, make: Callable[[str], DraftStream]) -> None:
        """`make` makes the stream to an address; log lines and errors name the address."""
        self._addresses = addresses
        self._make = make
        self._streams: dict[str, tuple[DraftStream, asyncio.Task[None]]] = {}
        self._refusals: dict[str, OutriderError] = {}
        self._is_stopping = False
        # This future is done when nothing is left to serve, or when a stream raised an exception.
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Say goodbye to all verifiers and end `run`."""
        self._is_stopping = True
        log.info("stopping: saying goodbye to %d verifiers", len(self._streams))
        for stream, _ in self._streams.values():
            stream.stop()
        self._end_if_over()

    async def run(self) -> None:
        """Serve until `stop`, or until every verifier has refused this drafter for good.

        Raises OutriderError with all reasons in the second case. With a `dns:` address further
        verifiers may join, so refusals do not end `run`. An exception of one of the strategy's
        `fatal` types ends all streams, and `run` raises it.
        """
        await self._take(self._addresses.now)
        works: list[Awaitable[None]] = [self._over]
        if self._addresses.has_names:
            works.append(self._addresses.follow(self._take))
        try:
            await until_first_end(*works)
        finally:
            tasks = [task for _, task in self._streams.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not self._is_stopping:
            self._raise_refusals()

    async def rejoin(self) -> None:
        """Replace each connection by a new one; return when the former connections are closed."""
        await asyncio.gather(*[stream.rejoin() for stream, _ in self._streams.values()])

    async def _take(self, addresses: Sequence[str]) -> None:
        """Start a stream to each new address, and stop dialling an address that is gone.

        If the verifier at a gone address has registered this drafter, the stream goes on until the
        verifier ends it.
        """
        if self._is_stopping:
            return
        for address, (stream, task) in list(self._streams.items()):
            is_gone = address not in addresses
            if is_gone and not stream.is_registered:
                stream.stop()
            if task.done() and (is_gone or address not in self._refusals):
                del self._streams[address]
                self._refusals.pop(address, None)
        for address in addresses:
            if address not in self._streams:
                stream = self._make(address)
                task = asyncio.create_task(self._run(address, stream))
                task.add_done_callback(self._stream_ended)
                self._streams[address] = stream, task

    async def _run(self, address: str, stream: DraftStream) -> None:
        try:
            await stream.run()
        except OutriderError as error:
            self._refusals[address] = error
            if len(self._streams) > 1 or self._addresses.has_names:
                log.error("%s refuses this drafter for good: %s", address, error)

    def _stream_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._over.done():
            self._over.set_exception(error)
        self._end_if_over()

    def _end_if_over(self) -> None:
        """End `run` if no stream is left and no further stream may join."""
        may_join = self._addresses.has_names and not self._is_stopping
        if may_join or self._over.done():
            return
        if all(task.done() for _, task in self._streams.values()):
            self._over.set_result(None)

    def _raise_refusals(self) -> None:
        refusals = list(self._refusals.items())
        if len(refusals) == 1:
            raise refusals[0][1]
        reasons = "; ".join([f"{address}: {error}" for address, error in refusals])
        raise OutriderError(
            refusals[0][1].reason, f"every verifier refuses this drafter: {reasons}"
        )


def own_id(wanted: str, tls: Tls | None) -> str:
    """Return a drafter's id.

    With TLS the id is the certificate's common name, or begins with this name and a slash. Raises
    OutriderError(INVALID_VALUE) if the certificate has no common name.
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
