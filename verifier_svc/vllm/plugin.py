"""Drafters for vLLM's own server: `vllm serve MODEL --scheduler-cls …OutriderScheduler`.

The scheduler's process serves the drafters' port on a thread of its own. The settings are the
verifier's, from OUTRIDER_VERIFIER_* in the environment. With another scheduler, nothing of this
runs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import torch
import vllm

from outrider import __version__
from outrider.errors import OutriderError, Reason
from outrider.process.clock import Clock
from outrider.process.network import rpc
from outrider.process.observability import telemetry
from outrider.process.observability.metrics_export import serve_metrics
from outrider.process.settings.config import load
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.model_info import Load, ModelInfo, Stage
from outrider.tokenizer import fingerprint, load_tokenizer
from outrider.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server
from verifier_svc.config import VerifierSettings
from verifier_svc.drafts.exchange import DraftExchange
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT, PAYING_DRAFTS
from verifier_svc.state.target_device import TargetDevice
from verifier_svc.streams.servicer import VerifierServicer, report_health
from verifier_svc.vllm.features import states_for
from verifier_svc.vllm.hub import DraftHub, Limits

log = logging.getLogger(__name__)

_START_S = 30.0
_own: list[tuple[VerifierSettings, Callable[[Any], DraftHub]]] = []


@contextmanager
def own_hub(settings: VerifierSettings, make: Callable[[Any], DraftHub]) -> Iterator[None]:
    """Within the block, a new scheduler gets its hub from `make`: our own server runs vLLM here."""
    _own.append((settings, make))
    try:
        yield
    finally:
        _own.pop()


def hub_for(vllm_config: Any) -> DraftHub:
    """Return the hub of a new scheduler.

    If our own server runs vLLM, the hub is the server's own. Otherwise the function opens a port
    for drafters, and returns that port's hub.

    Raises OutriderError if a setting is wrong, or the port cannot be bound.
    """
    if _own:
        return _own[-1][1](vllm_config)
    settings = settings_for(vllm_config)
    port = DraftPort(settings, vllm_config)
    port.start()
    return port.hub


def target_device(vllm_config: Any) -> TargetDevice:
    """Return the device where vLLM computes, if drafters could compute there too."""
    parallel = vllm_config.parallel_config
    if vllm_config.device_config.device.type != "cpu":
        from vllm.platforms import current_platform

        # An engine core sees only its own devices, from 0 on.
        try:
            uuids = map(current_platform.get_device_uuid, range(parallel.tensor_parallel_size))
            return TargetDevice(gpu_uuids=frozenset(uuids))
        except NotImplementedError:
            return TargetDevice()  # not a GPU of NVIDIA's
    if parallel.distributed_executor_backend == "mp":
        return TargetDevice()  # each of its worker processes leaves a core to the scheduler
    return TargetDevice.of_cpu(torch.get_num_threads())


def settings_for(vllm_config: Any) -> VerifierSettings:
    """Return the verifier's settings. Each engine core of data parallelism has ports of its own.

    Raises OutriderError if a setting is wrong.
    """
    if _own:
        return _own[-1][0]
    try:
        settings = load(VerifierSettings, {"target": vllm_config.model_config.model})
    except ValueError as error:
        raise OutriderError(Reason.INVALID_VALUE, f"OUTRIDER_VERIFIER_*: {error}") from error
    host, _, port = settings.listen.rpartition(":")
    index = vllm_config.parallel_config.data_parallel_index
    changes: dict[str, Any] = {}
    if port != "0":
        changes["listen"] = f"{host}:{int(port) + index}"
    if settings.metrics_port:
        changes["metrics_port"] = settings.metrics_port + index
    return settings.model_copy(update=changes)


class DraftPort:
    """The drafters' port of an engine core: a gRPC server on a thread beside vLLM's own thread."""

    def __init__(self, settings: VerifierSettings, vllm_config: Any) -> None:
        self._settings = settings
        model = vllm_config.model_config
        name, *aliases = settings.model_name or [model.served_model_name or settings.target]
        self._metrics = VerifierMetrics(name)
        policy = DraftTokensPolicy.parse(settings.draft_tokens)
        limits = Limits(
            model.get_vocab_size(),
            vllm_config.scheduler_config.max_num_seqs,
            max_drafters=settings.max_drafters,
        )
        self._deliver: Callable[[list[Delivery]], None] = _nobody
        drafts = EVERY_DRAFT if settings.always_draft else PAYING_DRAFTS
        self.hub = SharedHub(
            limits,
            policy,
            self._metrics,
            self._send,
            drafts,
            target_device=target_device(vllm_config),
            states=states_for(vllm_config, settings),
        )
        self.info = ModelInfo(
            name,
            Stage.READY,
            "vLLM serves the requests",
            tokenizer_fingerprint=fingerprint(load_tokenizer(settings.target)),
            vocab_size=limits.vocab_size,
            context_length=model.max_model_len,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(vllm_config.device_config.device),
            max_draft_tokens=policy.max_draft_tokens,
            server_version=__version__,
            engine=f"vllm {vllm.__version__}",
            aliases=tuple(aliases),
        )
        self._started: Future[None] = Future()

    def start(self) -> None:
        """Serve on a daemon thread; raise OutriderError if the port cannot be bound."""
        threading.Thread(target=self._run, name="outrider drafters", daemon=True).start()
        self._started.result(_START_S)

    def _send(self, deliveries: list[Delivery]) -> None:
        self._deliver(deliveries)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            log.exception("the drafters' port failed; vLLM goes on without drafts")
            if not self._started.done():
                self._started.set_exception(error)

    async def _serve(self) -> None:
        settings = self._settings
        telemetry.setup("outrider-verifier")
        servicer = VerifierServicer(self.info.model_id)
        server = rpc.Server("outrider.v1.VerifierService")
        add_VerifierServiceServicer_to_server(servicer, server.grpc)
        ports = await server.start(settings.listen, tls=settings.tls)
        serve_metrics(self._metrics.registry, settings, settings.tls)
        thread = EngineThread(self._build)
        await thread.built
        servicer.serve_drafters(thread, self.info)
        log.warning("drafters dial %s:%d", settings.listen.rpartition(":")[0], ports[0])
        self._started.set_result(None)
        with suppress(asyncio.CancelledError):
            await report_health(thread, server)

    def _build(self, deliver: Callable[[list[Delivery]], None]) -> PortEngine:
        self._deliver = deliver
        return PortEngine(self.hub)


class SharedHub(DraftHub):
    """A hub for requests of vLLM's server. Work posted to it runs on a thread beside vLLM's."""

    is_own = False

    def pause(self, seconds: float) -> None:
        """Give the turn to the other thread until it has run work or `seconds` have passed."""
        self.outbox.send_to_drafters()
        self.turn.wait(seconds)


class PortEngine:
    """Runs what the streams post, while vLLM does not use the hub. vLLM's server takes requests."""

    def __init__(self, hub: SharedHub) -> None:
        self._hub = hub

    @property
    def drafting(self) -> DraftExchange:
        """The engine's side of all draft streams."""
        return self._hub.drafting

    @property
    def clock(self) -> Clock:
        """The hub's clock."""
        return self._hub.clock

    def load(self) -> Load:
        """Return how busy vLLM is."""
        return self._hub.load()

    def post(self, work: Callable[[], object]) -> None:
        """Have the thread of `run` execute `work`."""
        self._hub.inbox.post(work)

    def stop(self) -> None:
        """Make `run` return."""
        self._hub.inbox.stop()

    def run(self) -> None:
        """Do the posted work, also during vLLM's forwards and while a step waits for drafts."""
        hub = self._hub
        while not hub.inbox.stopped:
            hub.inbox.wait(None)
            with hub.turn:
                try:
                    hub.inbox.run_all()
                    hub.outbox.send_to_drafters()
                # A fault of ours ends only the streams; vLLM and later drafters go on.
                except Exception:
                    log.exception("the drafters' port failed at a message")
                    hub.give_up()
                hub.turn.notify_all()


def _nobody(_: list[Delivery]) -> None:
    """Do nothing: no stream is open before the port is."""
