"""The verifier process: answers GetModel and health checks, loads the target, then serves it."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer

from outrider import __version__
from outrider.errors import OutriderError, Reason, invalid
from outrider.grammar.compiler import GrammarCompiler
from outrider.heads.loading import load_projections
from outrider.internal.v1.token_streams_pb2_grpc import add_TokenStreamServiceServicer_to_server
from outrider.lm.devices import gpu_uuid
from outrider.lm.pages import PagePool
from outrider.lm.runner import Bounds, ModelRunner
from outrider.lm.weights_fingerprint import weights_fingerprint
from outrider.process.network import rpc
from outrider.process.observability import telemetry
from outrider.process.observability.metrics_export import serve_metrics
from outrider.process.observability.process_metrics import add_process_metrics
from outrider.process.settings.config import need_vllm
from outrider.process.tasks import watch
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.messages import AcceptanceRule
from outrider.protocol.model_info import ModelInfo, Stage, with_fingerprint
from outrider.tokenizer import fingerprint, load_tokenizer
from outrider.v1.verifier_pb2_grpc import add_VerifierServiceServicer_to_server
from verifier_svc.config import VerifierSettings
from verifier_svc.engine.config import EngineConfig
from verifier_svc.engine.engine_thread import EngineThread
from verifier_svc.engine.loop import Engine
from verifier_svc.engine.outbox import Delivery
from verifier_svc.engine.served import ServedEngine
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT, PAYING_DRAFTS
from verifier_svc.state.target_device import TargetDevice
from verifier_svc.streams.in_process_stream import InProcessDrafter, InProcessVerifier
from verifier_svc.streams.servicer import VerifierServicer, report_health
from verifier_svc.verification.batch import DraftVerifier
from verifier_svc.verification.mask_lanes import Threads

# Length in tokens of each sequence in the trial forwards. Few sequences stay shorter than this for
# long. What longer sequences cost, the cost model learns from their steps.
_TRIAL_CONTEXT = 256
# Processor seconds that a request's masks may take in all, not counting the first 20 ms of each
# mask. A grammar that needs more is an attack or a mistake.
_MASK_S = 2.0
# Reasoning models write a thought between these tokens. Relaxed acceptance applies only within a
# thought.
_THINKING = ("<think>", "</think>")

log = logging.getLogger(__name__)


async def serve(
    settings: VerifierSettings,
    metrics: VerifierMetrics,
    in_process_drafters: Sequence[InProcessDrafter] = (),
) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises OutriderError if it cannot listen on the addresses, if the target cannot be served, if
    the engine stopped with an error, or if a drafter in this process lost the device.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    servicer = VerifierServicer(*settings.served_names)
    server = rpc.Server("outrider.v1.VerifierService", "outrider.internal.v1.TokenStreamService")
    add_VerifierServiceServicer_to_server(servicer, server.grpc)
    add_TokenStreamServiceServicer_to_server(servicer, server.grpc)
    sockets = []
    if settings.uds is not None:
        sockets.append(f"unix:{settings.uds}")
    ports = await server.start(settings.listen, *sockets, tls=settings.tls)
    telemetry.announce(f"verifier listening on {settings.listen.rpartition(':')[0]}:{ports[0]}")
    add_process_metrics(metrics.registry, lambda: server.is_serving, {"tls": settings.tls})
    serve_metrics(metrics.registry, settings, settings.tls)
    loader = _loader(settings, servicer, metrics, in_process_drafters)
    thread = EngineThread(loader.build)
    stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    built: asyncio.Future[Any] = thread.built
    ended: asyncio.Future[Any] = thread.ended
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    drafting: list[asyncio.Task[None]] = []
    try:
        await asyncio.wait([built, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not built.done():
            return
        await built
        servicer.serve(thread, loader.info, loader.grammars)
        health = watch(report_health(thread, server), "reporting whether the engine hangs")
        info = loader.info
        verifier = InProcessVerifier(thread, info)
        drafting += [_drafting(drafter, verifier, lost) for drafter in in_process_drafters]
        telemetry.announce(f"verifier ready: {info.model_id} in {info.dtype} on {info.device}")
        await asyncio.wait([ended, stopped, lost], return_when=asyncio.FIRST_COMPLETED)
        health.cancel()
        await asyncio.wait([health])
        await server.set_serving(False)
        if ended.done() or lost.done():
            what = f"the GPU failed {lost.result()}" if lost.done() else "the engine stopped"
            raise OutriderError(Reason.INTERNAL, f"{what}; the log above has the reason")
        log.info("stopping: running requests have %g s to finish", settings.drain_seconds)
        await servicer.drain(settings.drain_seconds)
        await thread.stop()
    finally:
        stopped.cancel()
        for task in drafting:
            task.cancel()
        await server.stop(0.5)
        telemetry.shutdown()


def _drafting(
    drafter: InProcessDrafter, verifier: InProcessVerifier, lost: asyncio.Future[str]
) -> asyncio.Task[None]:
    """Run a drafter in this process. If it fails, the verifier mostly goes on without it.

    If the drafter fails because the device has failed, `lost` gets the drafter's name, and the
    verifier ends. The target uses that device too, but without a request it would not notice the
    failure.
    """
    name = f"the drafter {drafter.name} in this process"

    def failed(error: BaseException) -> None:
        if isinstance(error, torch.AcceleratorError) and not lost.done():
            lost.set_result(f"under {name}")

    return watch(drafter.run(verifier), name, failed)


def _loader(
    settings: VerifierSettings,
    servicer: VerifierServicer,
    metrics: VerifierMetrics,
    in_process_drafters: Sequence[InProcessDrafter],
) -> EngineLoader:
    """Return the loader of the engine that the settings name."""
    if settings.engine == "native":
        return Loader(settings, servicer, metrics, in_process_drafters)
    need_vllm()
    from verifier_svc.vllm.loader import VllmLoader

    return VllmLoader(settings, servicer, metrics, in_process_drafters)


class EngineLoader(Protocol):
    """Builds an engine on the engine's thread.

    After the build, `info` describes the loaded model, and `grammars` compiles grammars for it.
    """

    info: ModelInfo
    grammars: GrammarCompiler | None

    def build(self, deliver: Callable[[list[Delivery]], None]) -> ServedEngine:
        """Build the engine, ready to run; raise OutriderError if the target cannot be served."""


class Loader:
    """Loads and warms up the target on the engine's thread; reports progress to the event loop."""

    def __init__(
        self,
        settings: VerifierSettings,
        servicer: VerifierServicer,
        metrics: VerifierMetrics,
        in_process_drafters: Sequence[InProcessDrafter] = (),
    ) -> None:
        self._in_process_drafters = in_process_drafters
        self._settings = settings
        self._servicer = servicer
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.info = servicer.info
        self.grammars: GrammarCompiler | None = None

    def _report(self, stage: Stage, detail: str) -> None:
        self._loop.call_soon_threadsafe(self._servicer.report, stage, detail)

    def build(self, deliver: Callable[[list[Delivery]], None]) -> Engine:
        """Build the engine, ready to run; raise OutriderError if the target cannot be served."""
        settings = self._settings
        policy = DraftTokensPolicy.parse(settings.draft_tokens)
        tokenizer = load_tokenizer(settings.target)
        identity = fingerprint(tokenizer)
        config = _config(settings, policy)
        bounds = Bounds(settings.max_sequences, 1 + config.largest_draft, config.max_batch_tokens)
        runner = self._load_model(bounds)
        pool = PagePool(runner.page_count, runner.page_size, prefix_caching=settings.prefix_caching)
        held = pool.page_count * pool.page_size
        context_length = min(runner.context_length, held)
        told = "the KV cache holds %d tokens in %.2f GiB; a request has at most %d"
        log.info(told, held, runner.cache_bytes / 2**30, context_length)
        known = ModelInfo(
            model_id=self.info.model_id,
            aliases=self.info.aliases,
            stage=Stage.READY,
            stage_detail="serving",
            tokenizer_fingerprint=identity,
            vocab_size=runner.vocab_size,
            context_length=context_length,
            eos_token_ids=runner.eos_token_ids,
            dtype=str(runner.dtype).removeprefix("torch."),
            device=str(runner.device),
            max_draft_tokens=policy.max_draft_tokens,
            weights_fingerprint=weights_fingerprint(settings.target),
            acceptance_settings=tuple(sorted(settings.acceptance_settings.items())),
            server_version=__version__,
        )
        self.info = with_fingerprint(known)
        engine = Engine(
            runner,
            pool,
            deliver,
            self._metrics,
            config,
            _draft_verifier(settings, tokenizer, runner.device),
            launches=runner.device.type == "cuda",
            sampled_drafts=settings.sampled_drafts,
            draft_policy=EVERY_DRAFT if settings.always_draft else PAYING_DRAFTS,
            target_device=_target_device(runner.device),
            mask_lanes=Threads(),
            mask_seconds=_MASK_S,
            features=runner,
        )
        self.grammars = self._grammar_compiler(runner)
        self._report(Stage.WARMING_UP, "running trial forwards")
        self._watch(runner)
        runner.capture(bounds)
        self.info = replace(
            self.info,
            graph_count=runner.graph_count,
            graph_memory_bytes=runner.graph_memory_bytes,
        )
        self._metrics.graphs(runner.graph_count, runner.graph_memory_bytes)
        engine.warm_up(min(_TRIAL_CONTEXT, context_length))
        self.grammars.start_workers()
        # The loaded objects live as long as the process. Without the freeze, each full collection
        # takes 100 ms to visit them.
        gc.collect()
        gc.freeze()
        return engine

    def _load_model(self, bounds: Bounds) -> ModelRunner:
        settings = self._settings
        return ModelRunner.load(
            settings.target,
            dtype=settings.dtype,
            device=settings.device,
            page_count=settings.page_count,
            bounds=bounds,
            memory_share=settings.gpu_memory_share,
            threads=settings.threads,
            trust_remote_code=settings.trust_remote_code,
            progress=lambda detail: self._report(Stage.LOADING, detail),
        )

    def _watch(self, runner: ModelRunner) -> None:
        """Make forwards keep the hidden states that the settings and this process's drafters name.

        Raises OutriderError(INVALID_VALUE) if the target has no such state, or if a folder that the
        settings name does not hold a head of the target that has a projection.
        """
        settings = self._settings
        found = load_projections(
            settings.feature_projection,
            settings.target,
            runner.device,
            trust_remote_code=settings.trust_remote_code,
        )
        runner.projections = found
        projected = [each.states for each in found.values()]
        for_drafters = [drafter.meet(runner) for drafter in self._in_process_drafters]
        states = {*settings.feature_states}.union(*projected, *for_drafters)
        if not runner.can_watch(states):
            message = f"must be -1 or in [0, {runner.layer_count}], not {sorted(states)}"
            raise invalid("feature_states", message)
        runner.watch(states)

    def _grammar_compiler(self, runner: ModelRunner) -> GrammarCompiler:
        settings = self._settings
        return GrammarCompiler(settings.target, runner.vocab_size, runner.eos_token_ids)


def _config(settings: VerifierSettings, policy: DraftTokensPolicy) -> EngineConfig:
    return EngineConfig(
        policy,
        settings.max_batch_tokens,
        settings.max_sequences,
        max_drafters=settings.max_drafters,
        # `synthetic_acceptance_rates` apply only to the main path, so they turn trees off.
        draft_trees=settings.draft_trees and not settings.synthetic_acceptance_rates,
    )


def _target_device(device: torch.device) -> TargetDevice:
    if device.type == "cuda":
        return TargetDevice(gpu_uuids=frozenset([gpu_uuid(device)]))
    return TargetDevice.of_cpu(torch.get_num_threads())


def _draft_verifier(
    settings: VerifierSettings, tokenizer: Tokenizer, device: torch.device
) -> DraftVerifier:
    [rule] = [rule for rule in AcceptanceRule if rule.label == settings.sampled_rule]
    thinking_ids = _thinking_ids(tokenizer)
    return DraftVerifier(rule, thinking_ids, tuple(settings.synthetic_acceptance_rates), device)


def _thinking_ids(tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return the ids of the tokens that begin and end thinking.

    Return None if the tokenizer lacks one of them.
    """
    begin_id, end_id = map(tokenizer.token_to_id, _THINKING)
    if begin_id is None or end_id is None:
        return None
    return begin_id, end_id
