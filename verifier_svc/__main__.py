"""`python -m verifier_svc`: serves GetModel and health at once, loads the target, then takes requests and drafters."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import uvloop
from outrider.lm.pages import PagePool
from outrider.lm.runner import ModelRunner
from prometheus_client import start_http_server

from outrider import rpc, telemetry
from outrider.config import parse
from outrider.errors import OutriderError, Reason
from outrider.messages import ModelInfo, Stage
from outrider.tokenizer import fingerprint, load_tokenizer
from outrider.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server
from verifier_svc.config import VerifierSettings
from verifier_svc.engine import Limits
from verifier_svc.engine_thread import EngineThread
from verifier_svc.metrics import Metrics
from verifier_svc.servicer import VerifierServicer

log = logging.getLogger("verifier")


async def serve(settings: VerifierSettings) -> None:
    """Run until SIGTERM or SIGINT; raises OutriderError when the target cannot be served."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    model_id = settings.model_name or settings.target
    servicer = VerifierServicer(model_id)
    server = rpc.Server("outrider.v1.VerifierService")
    add_VerifierServiceServicer_to_server(servicer, server.grpc)
    addresses = [settings.listen, *([f"unix:{settings.uds}"] if settings.uds is not None else [])]
    ports = await server.start(*addresses)
    print(f"verifier listening on {settings.listen.rpartition(':')[0]}:{ports[0]}", flush=True)
    loading = asyncio.create_task(_load(settings, servicer))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            engine = await loading
            await server.set_serving(True)
            print(f"verifier ready: {model_id} in {servicer.info.dtype} on {servicer.info.device}", flush=True)
            await asyncio.wait({stopped, engine.failed}, return_when=asyncio.FIRST_COMPLETED)
            await server.set_serving(False)
            if not engine.failed.done():
                await servicer.drain(settings.drain_seconds)
                await engine.stop()
    finally:
        loading.cancel()
        await server.stop(0.5)
        telemetry.shutdown()
    if loading.done() and not loading.cancelled() and (await loading).failed.done():
        raise OutriderError(Reason.INTERNAL, "the engine stopped; the log above has the reason")


async def _load(settings: VerifierSettings, servicer: VerifierServicer) -> EngineThread:
    """Load and warm up the target off the event loop, and open the service."""
    loop = asyncio.get_running_loop()

    def progress(detail: str) -> None:
        loop.call_soon_threadsafe(servicer.report, Stage.LOADING, detail)

    identity = await asyncio.to_thread(lambda: fingerprint(load_tokenizer(settings.target)))
    runner = await asyncio.to_thread(_load_runner, settings, progress)
    model_id = servicer.info.model_id
    metrics = Metrics(model_id)
    if settings.metrics_port:
        start_http_server(settings.metrics_port, "127.0.0.1", registry=metrics.registry)
    pool = PagePool(runner.page_count, runner.page_size, prefix_caching=settings.prefix_caching)
    limits = Limits(settings.depth, settings.max_batch_tokens, settings.max_sequences, settings.max_waiting)
    engine = EngineThread(runner, pool, metrics, limits, trust_draft_distributions=settings.trust_draft_distributions)
    info = ModelInfo(
        model_id=model_id,
        stage=Stage.READY,
        stage_detail="serving",
        tokenizer_fingerprint=identity,
        vocab_size=runner.vocab_size,
        context_length=min(runner.context_length, pool.page_count * pool.page_size),
        eos_token_ids=runner.eos_token_ids,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
        max_depth=settings.depth,
    )
    servicer.serve(engine, info)
    return engine


def _load_runner(settings: VerifierSettings, progress: object) -> ModelRunner:
    return ModelRunner.load(
        settings.target,
        dtype=settings.dtype,
        device=settings.device,
        page_size=settings.page_size,
        page_count=settings.page_count,
        threads=settings.threads,
        trust_remote_code=settings.trust_remote_code,
        progress=progress,
    )


def main() -> None:
    """Entry point; exits with status 1 and a sentence when the target cannot be served."""
    settings = parse(VerifierSettings, "verifier", sys.argv[1:])
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    telemetry.setup("outrider-verifier", endpoint=settings.otlp_endpoint, sample_ratio=settings.trace_sample_ratio)
    # The engine's thread and the event loop share the interpreter; at the default of 5 ms the loop could hold up a whole step.
    sys.setswitchinterval(0.0005)
    try:
        uvloop.run(serve(settings))
    except OutriderError as error:
        raise SystemExit(f"verifier: {error}") from error


if __name__ == "__main__":
    main()
