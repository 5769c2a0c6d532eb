"""The verifier as a process: serves GetModel and health at once, loads the target, then takes requests and drafters."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer

from outrider.draft_tokens_policy import DraftTokensPolicy
from outrider.errors import OutriderError, Reason
from outrider.grammar.compiler import GrammarCompiler
from outrider.internal.v1.token_streams_pb2_grpc import add_TokenStreamServiceServicer_to_server
from outrider.lm.pages import PagePool
from outrider.lm.runner import Bounds, ModelRunner
from outrider.messages import AcceptanceRule
from outrider.model_info import ModelInfo, Stage
from outrider.process import rpc, telemetry
from outrider.process.metrics_export import serve_metrics
from outrider.tokenizer import fingerprint, load_tokenizer
from outrider.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server
from verifier_svc.config import VerifierSettings
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outgoing import Delivery
from verifier_svc.engine.target import Limits
from verifier_svc.metrics import Metrics
from verifier_svc.streams.servicer import VerifierServicer
from verifier_svc.verification.batch import DraftVerifier

# Length of the sequences in trial forwards: few are shorter for long, and how much longer others get is learned as they do.
_TRIAL_CONTEXT = 256


async def serve(settings: VerifierSettings, metrics: Metrics) -> None:
    """Run until SIGTERM or SIGINT; raises OutriderError when the target cannot be served."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    servicer = VerifierServicer(settings.served_name)
    server = rpc.Server("outrider.v1.VerifierService", "outrider.internal.v1.TokenStreamService")
    add_VerifierServiceServicer_to_server(servicer, server.grpc)
    add_TokenStreamServiceServicer_to_server(servicer, server.grpc)
    ports = await server.start(
        settings.listen, *([f"unix:{settings.uds}"] if settings.uds is not None else [])
    )
    print(f"verifier listening on {settings.listen.rpartition(':')[0]}:{ports[0]}", flush=True)
    serve_metrics(metrics.registry, settings)
    loader = Loader(settings, servicer, metrics)
    thread = EngineThread(loader.build)
    stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    built: asyncio.Future[Any] = thread.built
    ended: asyncio.Future[Any] = thread.ended
    try:
        await asyncio.wait([built, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not built.done():
            return
        await built
        servicer.serve(thread, loader.info, loader.grammars)
        await server.set_serving(True)
        print(
            f"verifier ready: {loader.info.model_id} in {loader.info.dtype} on {loader.info.device}",
            flush=True,
        )
        await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
        await server.set_serving(False)
        if ended.done():
            raise OutriderError(Reason.INTERNAL, "the engine stopped; the log above has the reason")
        await servicer.drain(settings.drain_seconds)
        await thread.stop()
    finally:
        stopped.cancel()
        await server.stop(0.5)
        telemetry.shutdown()


class Loader:
    """Loads and warms up the target on the engine's thread, and reports how far it is to the event loop's."""

    def __init__(
        self, settings: VerifierSettings, servicer: VerifierServicer, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._servicer = servicer
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.info = servicer.info
        self.grammars: GrammarCompiler | None = None

    def _report(self, stage: Stage, detail: str) -> None:
        self._loop.call_soon_threadsafe(self._servicer.report, stage, detail)

    def build(self, deliver: Callable[[list[Delivery]], None]) -> Engine:
        """The engine, ready to run; raises OutriderError when the target cannot be served."""
        settings = self._settings
        policy = DraftTokensPolicy.parse(settings.draft_tokens)
        tokenizer = load_tokenizer(settings.target)
        identity = fingerprint(tokenizer)
        runner = ModelRunner.load(
            settings.target,
            dtype=settings.dtype,
            device=settings.device,
            page_size=settings.page_size,
            page_count=settings.page_count,
            threads=settings.threads,
            trust_remote_code=settings.trust_remote_code,
            progress=lambda detail: self._report(Stage.LOADING, detail),
        )
        pool = PagePool(runner.page_count, runner.page_size, prefix_caching=settings.prefix_caching)
        self.info = ModelInfo(
            model_id=self.info.model_id,
            stage=Stage.READY,
            stage_detail="serving",
            tokenizer_fingerprint=identity,
            vocab_size=runner.vocab_size,
            context_length=min(runner.context_length, pool.page_count * pool.page_size),
            eos_token_ids=runner.eos_token_ids,
            dtype=str(runner.dtype).removeprefix("torch."),
            device=str(runner.device),
            max_draft_tokens=policy.max_draft_tokens,
        )
        rule = (
            AcceptanceRule.BLOCK if settings.sampled_rule == "block" else AcceptanceRule.TOKEN_WISE
        )
        thinking_ids = _thinking_ids(tokenizer, settings.thinking_tokens)
        draft_verifier = DraftVerifier(rule, thinking_ids, settings.synthetic_acceptance_rate)
        limits = Limits(
            policy,
            settings.max_batch_tokens,
            settings.max_sequences,
            settings.max_waiting,
            settings.max_drafters,
        )
        engine = Engine(
            runner,
            pool,
            deliver,
            self._metrics,
            limits,
            draft_verifier,
            trust_draft_distributions=settings.trust_draft_distributions,
            always_draft=settings.always_draft,
            own_cores=_cores_without_spare() if runner.device.type == "cpu" else None,
            traced_steps=settings.trace_step_share,
        )
        self.grammars = GrammarCompiler(
            settings.target,
            runner.vocab_size,
            runner.eos_token_ids,
            backend=settings.grammar_backend,
            compile_seconds=settings.grammar_compile_seconds,
            cache_bytes=settings.grammar_cache_bytes,
        )
        self._report(Stage.WARMING_UP, "running trial forwards")
        runner.capture(
            Bounds(settings.max_sequences, 1 + policy.max_draft_tokens, settings.max_batch_tokens)
        )
        engine.warm_up(min(_TRIAL_CONTEXT, self.info.context_length))
        # What loading left behind lives as long as the process; without this a collection now and then takes 100 ms to see that.
        gc.collect()
        gc.freeze()
        return engine


def _cores_without_spare() -> frozenset[int] | None:
    """The cores of this process when torch's threads fill them."""
    cores = os.sched_getaffinity(0)
    return frozenset(cores) if torch.get_num_threads() >= len(cores) else None


def _thinking_ids(tokenizer: Tokenizer, tokens: str) -> tuple[int, int] | None:
    """Ids of the tokens that begin and end thinking; None when the tokenizer lacks one of them."""
    begin, _, end = tokens.partition(",")
    ids = tokenizer.token_to_id(begin), tokenizer.token_to_id(end)
    return None if ids[0] is None or ids[1] is None else (ids[0], ids[1])
