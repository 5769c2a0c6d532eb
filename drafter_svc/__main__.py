"""The entry point: `python -m drafter_svc`.

It pins the process to its cores, loads the family, and drafts until SIGTERM or SIGINT.
`python -m drafter_svc erase` deletes a tenant's n-grams from Redis instead.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import platform
import signal
import sys
from functools import partial

import uvloop

from drafter_svc.check import check
from drafter_svc.config import DrafterSettings, FamilyChoice, settings_schema
from drafter_svc.families.registry import find_family, known_families
from drafter_svc.metrics import Metrics
from drafter_svc.observer import CountingObserver
from drafter_svc.placement import PlacementPlan, choose_address, plan
from outrider.drafter.dialled import Dialled
from outrider.drafter.serve import DraftStreams, own_id
from outrider.drafter.strategy import Strategy
from outrider.drafter.stream import DraftStream
from outrider.errors import OutriderError
from outrider.process import rpc, telemetry
from outrider.process.addresses import Addresses
from outrider.process.check_config import check_config
from outrider.process.config import load, parse
from outrider.process.metrics_export import pushing_metrics, serve_metrics
from outrider.process.process_metrics import add_process_metrics
from outrider.process.usage import refuse
from outrider.protocol.draft_messages import Hello
from outrider.protocol.model_info import ModelInfo

SERVICE = "outrider.v1.Drafter"
_PROGRAM = "drafter"
_SERVICE_NAME = "outrider-drafter"


class _StreamObserver(CountingObserver):
    """Report the events of one verifier's stream to the metrics and the health service.

    The health service says SERVING while at least one verifier has registered this drafter.
    """

    def __init__(
        self, server: rpc.Server, metrics: Metrics, registered: set[_StreamObserver]
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
        print(f"drafter {self._name} registered with {address}", flush=True)

    async def lost(self) -> None:
        """Say NOT_SERVING unless another verifier has this drafter."""
        self._registered.discard(self)
        await super().lost()
        await self._server.set_serving(bool(self._registered))


async def serve(settings: DrafterSettings, place: PlacementPlan, metrics: Metrics) -> None:
    """Draft until SIGTERM or SIGINT.

    Raises OutriderError once every verifier has refused this drafter for good.
    """
    server = rpc.Server(SERVICE)
    try:
        # The health service answers NOT_SERVING while the model loads.
        await server.start(settings.listen, tls=settings.tls)
        add_process_metrics(metrics.registry, lambda: server.is_serving, {"tls": settings.tls})
        serve_metrics(metrics.registry, settings, settings.tls)
        streams = await _streams(settings, place, server, metrics)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, streams.stop)
        # Objects made by loading live as long as the process. Freeze them: a garbage collection
        # that visited them again would delay a draft.
        gc.collect()
        gc.freeze()
        with pushing_metrics(metrics.registry, _SERVICE_NAME, metrics.drafter_id):
            await streams.run()
    finally:
        await server.stop(0.2)
        telemetry.shutdown()


async def _streams(
    settings: DrafterSettings, place: PlacementPlan, server: rpc.Server, metrics: Metrics
) -> DraftStreams:
    """Load the family and make one stream to each verifier. The streams set the server's health."""
    loaded = await find_family(settings.family).load(settings, place, metrics)
    name = metrics.drafter_id

    def hello(family: Strategy, info: ModelInfo) -> Hello:
        return Hello(
            drafter_id=name,
            family=family.name,
            # A family that works on ids alone is right for any tokenizer: claim the verifier's.
            tokenizer_fingerprint=loaded.tokenizer_fingerprint or info.tokenizer_fingerprint,
            max_draft_tokens=family.max_draft_tokens,
            distributions=family.distributions,
            feature_request=family.feature_request,
            placement=place.describe(family.device),
        )

    registered: set[_StreamObserver] = set()
    sockets = dict(itertools.zip_longest(settings.verifier, settings.uds))

    def stream(verifier: str) -> DraftStream:
        observer = _StreamObserver(server, metrics, registered)
        address = partial(choose_address, verifier, sockets.get(verifier))
        return DraftStream(Dialled(address, settings.tls), loaded.make, hello, observer)

    addresses = Addresses(settings.verifier, lambda _: metrics.unresolved.inc())
    return DraftStreams(addresses, stream)


def _parse_settings(arguments: list[str]) -> DrafterSettings:
    """Read the settings from flags, environment and file.

    The family is read first, because it decides which other settings exist. If a setting is wrong,
    print one sentence for each problem and exit with status 2.
    """
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in FamilyChoice.model_fields:
        flags.add_argument(f"--{name}", nargs="?")
    given = {
        name: value
        for name, value in vars(flags.parse_known_args(arguments)[0]).items()
        if value is not None
    }
    schema: type[DrafterSettings] = DrafterSettings
    try:
        family = load(FamilyChoice, given).family
        if family:
            schema = settings_schema(family)
    except (ValueError, OutriderError) as error:
        refuse(_PROGRAM, *str(error).splitlines())
    if not family and "--help" not in arguments:
        choices = ", ".join(known_families())
        refuse(_PROGRAM, f"family: must be given: {choices} or package.module:Class")
    return parse(schema, _PROGRAM, arguments)


def main() -> None:
    """Run the command. After an error that a retry cannot cure, print it and exit with status 1."""
    if sys.argv[1:2] == ["erase"]:
        from drafter_svc.erase import main as erase

        erase(sys.argv[2:])
        return
    settings = _parse_settings(sys.argv[1:])
    if settings.check_config:
        check_config(settings, _PROGRAM, partial(check, settings))
        return
    family = find_family(settings.family).name
    telemetry.setup_logging(settings.log_level, settings.log_format)
    name = settings.id or f"{family}-{platform.node()}-{os.getpid()}"
    try:
        metrics = Metrics(own_id(name, settings.tls), family)
        telemetry.setup(_SERVICE_NAME, instance=metrics.drafter_id)
        # Apply the placement before torch is imported: torch sizes its thread pools by the cores
        # that it sees, and memory stays on the NUMA node that first touched it.
        place = plan(settings.cores, settings.numa_node, settings.threads)
        place.apply()
        uvloop.run(serve(settings, place, metrics))
    except OutriderError as error:
        raise SystemExit(f"drafter: {error}") from error
    telemetry.leave()


if __name__ == "__main__":
    main()
