"""Runs a drafter: its streams to the verifiers, its health and its metrics."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
from functools import partial

from drafter_svc.config import DrafterSettings
from drafter_svc.families.base import Loaded
from drafter_svc.families.registry import find_family
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.observer import CountingObserver
from drafter_svc.placement import PlacementPlan, choose_address
from drafter_svc.served_weights import ServedWeights
from outrider.drafter.grpc_transport import Dialled
from outrider.drafter.serve import DraftStreams
from outrider.drafter.strategy import Strategy
from outrider.drafter.stream import DraftStream
from outrider.process.network import rpc
from outrider.process.network.addresses import Addresses
from outrider.process.observability import telemetry
from outrider.process.observability.metrics_export import pushing_metrics, serve_metrics
from outrider.process.observability.process_metrics import add_process_metrics
from outrider.process.tasks import until_first_end
from outrider.protocol.draft_messages import Hello
from outrider.protocol.model_info import ModelInfo

SERVICE = "outrider.v1.Drafter"
SERVICE_NAME = "outrider-drafter"


class _StreamObserver(CountingObserver):
    """Reports the events of one verifier's stream to the metrics and the health service.

    The health service says SERVING while at least one verifier has registered this drafter.
    """

    def __init__(
        self, server: rpc.Server, metrics: DrafterMetrics, registered: set[_StreamObserver]
    ) -> None:
        """All streams share `registered`: the observers of the streams that are registered now."""
        super().__init__(metrics)
        self._server = server
        self._name = metrics.drafter_id
        self._registered = registered

    async def registered(self, address: str) -> None:
        """Say SERVING, and print the line that scripts wait for."""
        self._registered.add(self)
        await super().registered(address)
        await self._server.set_serving(True)
        telemetry.announce(f"drafter {self._name} registered with {address}")

    async def lost(self) -> None:
        """Say NOT_SERVING unless another verifier has registered this drafter."""
        self._registered.discard(self)
        await super().lost()
        await self._server.set_serving(bool(self._registered))


async def serve(settings: DrafterSettings, place: PlacementPlan, metrics: DrafterMetrics) -> None:
    """Draft until SIGTERM or SIGINT.

    Raises OutriderError if a setting cannot be used, and when every verifier has refused this
    drafter for good.
    """
    server = rpc.Server(SERVICE)
    try:
        # The health service answers NOT_SERVING while the model loads.
        await server.start(settings.listen, tls=settings.tls)
        add_process_metrics(metrics.registry, lambda: server.is_serving, {"tls": settings.tls})
        serve_metrics(metrics.registry, settings, settings.tls)
        weights = ServedWeights(partial(_load, settings, place, metrics))
        loop = asyncio.get_running_loop()
        if find_family(settings.family).has_weights:
            loop.add_signal_handler(signal.SIGHUP, weights.ask)
        await weights.load()
        streams = _streams(settings, place, server, metrics, weights)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, streams.stop)
        # Most objects made by loading live as long as the process. Freeze them: a garbage
        # collection that visited them again would delay a draft.
        gc.collect()
        gc.freeze()
        with pushing_metrics(metrics.registry, SERVICE_NAME, metrics.drafter_id):
            await until_first_end(streams.run(), weights.follow(streams.rejoin))
    finally:
        await server.stop(0.2)
        telemetry.shutdown()


async def _load(
    settings: DrafterSettings, place: PlacementPlan, metrics: DrafterMetrics, page_count: int | None
) -> Loaded:
    """Load the family. Unless `page_count` is None, its KV cache gets this number of pages."""
    if page_count is not None:
        settings = settings.model_copy(update={"page_count": page_count})
    return await find_family(settings.family).load(settings, place, metrics)


def _streams(
    settings: DrafterSettings,
    place: PlacementPlan,
    server: rpc.Server,
    metrics: DrafterMetrics,
    weights: ServedWeights,
) -> DraftStreams:
    """Make one stream to each verifier. The streams set the server's health."""
    name = metrics.drafter_id

    def hello(family: Strategy, info: ModelInfo) -> Hello:
        return Hello(
            drafter_id=name,
            family=family.name,
            # A family that works only on ids suits any tokenizer, so it states the verifier's
            # tokenizer.
            tokenizer_fingerprint=weights.loaded.tokenizer_fingerprint
            or info.tokenizer_fingerprint,
            max_draft_tokens=family.max_draft_tokens,
            distributions=family.distributions,
            feature_request=family.feature_request,
            requires_grammar=family.requires_grammar,
            weights_version=family.weights_version,
            placement=place.describe(family.device, family.gpu_uuid),
        )

    registered: set[_StreamObserver] = set()
    sockets = dict(itertools.zip_longest(settings.verifier, settings.uds))

    def stream(verifier: str) -> DraftStream:
        observer = _StreamObserver(server, metrics, registered)
        address = partial(choose_address, verifier, sockets.get(verifier))
        return DraftStream(Dialled(address, settings.tls), weights.make, hello, observer)

    addresses = Addresses(settings.verifier, lambda _: metrics.unresolved.inc())
    return DraftStreams(addresses, stream)
