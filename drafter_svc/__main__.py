"""`python -m drafter_svc`: takes its place on the machine, then drafts for verifiers until told to stop; or `erase`s a tenant."""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import platform
import signal
import sys
from pathlib import Path

import uvloop

from drafter_svc.config import DrafterSettings, FamilyChoice, settings_schema
from drafter_svc.families.registry import find_family, known_families
from drafter_svc.metrics import Metrics, StreamMetrics
from drafter_svc.placement import PlacementPlan, choose_address, plan
from outrider.drafter.strategy import Strategy
from outrider.drafter.stream import DraftStream, Observer
from outrider.drafter.streams import DraftStreams
from outrider.errors import OutriderError
from outrider.messages import DraftBatch, Hello
from outrider.model_info import ModelInfo
from outrider.process import rpc, telemetry
from outrider.process.config import load, parse
from outrider.process.metrics_export import sending_metrics, serve_metrics
from outrider.process.usage import refuse

SERVICE = "outrider.v1.Drafter"
_PROGRAM = "drafter"
_SERVICE_NAME = "outrider-drafter"


class _Told(Observer):
    """Passes what one verifier's stream says to metrics and health: serving while a verifier has this drafter."""

    def __init__(self, server: rpc.Server, metrics: Metrics, registered: set[_Told]) -> None:
        """`registered` are those of all streams that verifiers took."""
        self._server = server
        self._metrics = metrics
        self._stream = StreamMetrics(metrics)
        self._registered = registered

    async def registered(self, address: str) -> None:
        self._registered.add(self)
        self._stream.registered()
        await self._server.set_serving(True)
        print(f"drafter {self._metrics.drafter_id} registered with {address}", flush=True)

    async def lost(self) -> None:
        self._registered.discard(self)
        self._stream.lost()
        await self._server.set_serving(bool(self._registered))

    def drafted(self, batch: DraftBatch, seconds: float) -> None:
        self._metrics.drafted(batch, seconds)

    def following(self, sequence_count: int, abandoned_count: int) -> None:
        self._stream.following(sequence_count, abandoned_count)


async def serve(settings: DrafterSettings, place: PlacementPlan, metrics: Metrics) -> None:
    """Draft until SIGTERM or SIGINT; raises OutriderError when no verifier will ever have this drafter."""
    server = rpc.Server(SERVICE)
    try:
        # Answers NOT_SERVING while the model loads.
        await server.start(settings.listen)
        serve_metrics(metrics.registry, settings)
        streams = await _streams(settings, place, server, metrics)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, streams.stop)
        # What loading left behind lives as long as the process; a collection that looks at it again makes a draft late.
        gc.collect()
        gc.freeze()
        await streams.run()
    finally:
        await server.stop(0.2)
        telemetry.shutdown()


async def _streams(
    settings: DrafterSettings, place: PlacementPlan, server: rpc.Server, metrics: Metrics
) -> DraftStreams:
    """Load what drafts and make a stream to each verifier; they set the server's health."""
    loaded = await find_family(settings.family).load(settings, place, metrics)
    name = metrics.drafter_id

    def hello(family: Strategy, info: ModelInfo) -> Hello:
        return Hello(
            drafter_id=name,
            family=family.name,
            # A drafter that works on ids alone has the tokenizer that the verifier has.
            tokenizer_fingerprint=loaded.tokenizer_fingerprint or info.tokenizer_fingerprint,
            max_draft_tokens=family.max_draft_tokens,
            distributions=family.distributions,
            placement=place.describe(family.device),
        )

    registered: set[_Told] = set()

    def stream(verifier: str, uds: Path | None) -> DraftStream:
        told = _Told(server, metrics, registered)
        return DraftStream(lambda: choose_address(verifier, uds), loaded.make, hello, told)

    pairs = itertools.zip_longest(settings.verifier, settings.uds)
    return DraftStreams([(verifier, stream(verifier, uds)) for verifier, uds in pairs])


def _settings(arguments: list[str]) -> DrafterSettings:
    """What flags, environment and file say; the family that they name decides which settings there are.

    Exits with status 2, and a sentence for each problem, on any.
    """
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in FamilyChoice.model_fields:
        flags.add_argument(f"--{name}", nargs="?")
    given = {
        name: value
        for name, value in vars(flags.parse_known_args(arguments)[0]).items()
        if value is not None
    }
    try:
        family = load(FamilyChoice, given).family
        schema = settings_schema(family) if family else DrafterSettings
    except (ValueError, OutriderError) as error:
        refuse(_PROGRAM, *str(error).splitlines())
    if not family and "--help" not in arguments:
        refuse(
            _PROGRAM,
            f"family: must be given: {', '.join(known_families())} or package.module:Class",
        )
    return parse(schema, _PROGRAM, arguments)


def main() -> None:
    """Entry point; exits with status 1 and a sentence when there is no use in trying on."""
    if sys.argv[1:2] == ["erase"]:
        from drafter_svc.erase import main as erase

        erase(sys.argv[2:])
        return
    settings = _settings(sys.argv[1:])
    family = find_family(settings.family).name
    telemetry.setup_logging(settings.log_level)
    telemetry.setup(
        _SERVICE_NAME, endpoint=settings.otlp_endpoint, sample_ratio=settings.trace_sample_ratio
    )
    metrics = Metrics(settings.id or f"{family}-{platform.node()}-{os.getpid()}", family)
    try:
        # Before torch is imported: it sizes its thread pools by the cores it sees, and memory stays where it was first touched.
        place = plan(settings.placement, settings.cores, settings.numa_node, settings.threads)
        place.apply()
        with sending_metrics(metrics.registry, _SERVICE_NAME, settings):
            uvloop.run(serve(settings, place, metrics))
    except OutriderError as error:
        raise SystemExit(f"drafter: {error}") from error
    telemetry.leave()


if __name__ == "__main__":
    main()
