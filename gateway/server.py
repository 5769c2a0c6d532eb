"""Runs the gateway: HTTP and gRPC on one event loop, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Iterator
from functools import partial

import uvicorn

from gateway.access.gate import Gate
from gateway.access.interceptor import RequireKeyInCalls
from gateway.access_log import AccessLog
from gateway.app import create_app
from gateway.config import GatewaySettings
from gateway.generation.generate import Generation
from gateway.http.endpoints import lost_drafters, service_status
from gateway.http.ingress.connections import UNSENT_BYTES, protocol
from gateway.metrics import GatewayMetrics, observe_lag
from gateway.rpc.call_log import LogCalls
from gateway.rpc.servicer import MAX_MESSAGE_BYTES, SERVICE, GenerationServicer
from gateway.text.prompts import Prompts
from gateway.upstream.load_gauges import LoadGauges
from gateway.upstream.routing import Router
from outrider.errors import OutriderError, Reason
from outrider.process.network import rpc
from outrider.process.network.ports import refused
from outrider.process.observability import telemetry
from outrider.process.observability.process_metrics import add_process_metrics
from outrider.process.security.roles import Role
from outrider.process.security.tls import Tls, http_context
from outrider.process.tasks import keep_running, watch
from outrider.v1 import generation_pb2_grpc

log = logging.getLogger(__name__)

# A stopping gateway lets clients read the end of their answers for this long.
_LAST_READ_S = 2.0
# uvicorn waits for a request's task for this long. Each task ends long before that.
_CANCEL_S = 20


class _HttpServer(uvicorn.Server):
    """uvicorn without signal handlers, since `Gateway.stop` shuts HTTP and gRPC down together."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def hang_up(self) -> None:
        """End all connections at once."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class Gateway:
    """A gateway. After `start` it listens on `http_url` and `grpc_address`."""

    def __init__(self, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self._settings = settings
        prompts = Prompts(settings.tokenizer, settings.tool_format)
        tls = settings.tls
        self.router = Router(
            settings.verifier,
            prompts.fingerprint,
            tls,
            lambda name: metrics.unresolved.labels(name).inc(),
        )
        log.info("%s", prompts.answers)
        self._tls = settings.public_tls
        self.generation = Generation(
            self.router,
            prompts,
            metrics,
            settings.resume_seconds,
            settings.patience_seconds,
        )
        self.gate = Gate(settings)
        if self.gate.keys is not None:
            metrics.by_tenant = {}
        log_access = AccessLog(metrics)
        kept_s = settings.keep_alive_seconds
        config = uvicorn.Config(
            create_app(settings, self.generation, metrics, self.gate),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            http=protocol(settings, log_access),
            ws="none",
            timeout_keep_alive=kept_s,  # type: ignore[arg-type]  # it takes fractions as well
            # The time is rounded down, so that a client stops using the connection before the
            # gateway closes it.
            headers=[("keep-alive", f"timeout={int(kept_s)}")],
            timeout_graceful_shutdown=_CANCEL_S,
            ssl_context_factory=None if self._tls is None else partial(_context, self._tls),
        )
        self._http = _HttpServer(config)
        self._grpc = rpc.Server(
            SERVICE,
            max_request_bytes=MAX_MESSAGE_BYTES,
            interceptors=[LogCalls(log_access), RequireKeyInCalls(self.gate)],
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(self.generation, self.gate), self._grpc.grpc
        )
        metrics.registry.register(LoadGauges(self.router))
        self.metrics = metrics
        self._watch()
        self._tasks: list[asyncio.Task[None]] = []
        self.broken = asyncio.Event()
        """Set when the HTTP server has ended by itself."""
        self.http_url = ""
        self.grpc_address = ""

    def _watch(self) -> None:
        """Make the metrics read the gateway's state at each scrape."""
        metrics, router = self.metrics, self.router
        metrics.differing.set_function(lambda: len(router.differing))
        metrics.degraded.set_function(lambda: service_status(router)[0] == "degraded")
        metrics.drafters_lost.set_function(lambda: len(set(lost_drafters(router))))
        tls = {"tls": self._settings.tls, "public-tls": self._tls}
        add_process_metrics(metrics.registry, lambda: router.ready, tls)

    async def start(self) -> None:
        """Start to listen. Raises OutriderError(INVALID_VALUE) if an address cannot be bound."""
        settings = self._settings
        listener = _listen(settings.http_host, settings.http_port)
        [port] = await self._grpc.start(settings.grpc_listen, tls=self._tls, flag="grpc-listen")
        self.grpc_address = settings.grpc_listen
        if not settings.grpc_listen.startswith("unix:"):
            self.grpc_address = f"{settings.grpc_listen.rpartition(':')[0]}:{port}"
        host = f"[{settings.http_host}]" if ":" in settings.http_host else settings.http_host
        scheme = "http" if self._tls is None else "https"
        self.http_url = f"{scheme}://{host}:{listener.getsockname()[1]}"
        http = self._http.serve(sockets=[listener])
        serving = watch(http, "the HTTP server", lambda _: self.broken.set())
        measuring = keep_running(
            lambda: observe_lag(self.metrics.loop_lag_s), "measuring the event loop's lag"
        )
        self._tasks = [serving, measuring]
        if self.gate.keys is not None:
            self._tasks.append(keep_running(self.gate.keys.follow, "following the keys' file"))
        self.router.start(self._grpc.set_serving)

    async def stop(self) -> None:
        """Refuse new requests, let requests run for `drain_seconds`, and fail those that still run.

        Until everything has ended, new HTTP requests get an error: the gateway is shutting down.
        """
        drain_s = self._settings.drain_seconds
        grpc_stopped = asyncio.create_task(self._grpc.stop(drain_s + _LAST_READ_S))
        await self.router.drain(drain_s)
        self._http.should_exit = True
        for task in self._tasks[:1]:
            await asyncio.wait({task}, timeout=_LAST_READ_S)
            # Each client that remains does not read its answer, or does not finish its request.
            self._http.hang_up()
            await asyncio.wait({task})
        await grpc_stopped
        for task in self._tasks[1:]:
            task.cancel()
        await self.router.close()


def _context(tls: Tls, *_: object) -> ssl.SSLContext:
    """Return the TLS context for uvicorn, whose configuration and default context are ignored."""
    return http_context(tls)


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises OutriderError(INVALID_VALUE) if the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns off Nagle's algorithm only for sockets with an explicit protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Without this bound, the kernel would take megabytes of an answer that the client does not
        # read.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as cause:
        listener.close()
        raise refused("http-port", host, port, cause) from cause
    return listener


@contextlib.asynccontextmanager
async def running(settings: GatewaySettings, metrics: GatewayMetrics) -> AsyncIterator[Gateway]:
    """Run a gateway during the block."""
    gateway = Gateway(settings, metrics)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def serve(settings: GatewaySettings, metrics: GatewayMetrics) -> None:
    """Run until SIGTERM or SIGINT.

    Raises OutriderError: INTERNAL if the HTTP server ends, INVALID_VALUE if a setting cannot be
    used. A certificate that is not a gateway's cannot be used, since verifiers would refuse every
    request.
    """
    if settings.tls is not None:
        settings.tls.check_role(Role.GATEWAY)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with running(settings, metrics) as gateway:
        # Objects made at the start live as long as the process. Without `freeze` the collector
        # would look at them again and stall every stream.
        gc.collect()
        gc.freeze()
        http = f"{gateway.http_url} (OpenAI API)"
        telemetry.announce(f"gateway listening on {http} and {gateway.grpc_address} (gRPC)")
        events = [asyncio.ensure_future(event.wait()) for event in (ended, gateway.broken)]
        await asyncio.wait(events, return_when=FIRST_COMPLETED)
        log.info("stopping: running requests have %g s", settings.drain_seconds)
        if gateway.broken.is_set():
            message = "the HTTP server has ended; the log has the reason"
            raise OutriderError(Reason.INTERNAL, message)
