"""`python -m drafter_svc`: takes its place on the machine, then drafts for a verifier until told to stop; or `erase`s a tenant."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import uvloop

from drafter_svc.config import DrafterSettings
from drafter_svc.families.base import Family
from drafter_svc.metrics import Metrics
from drafter_svc.placement import PlacementPlan, choose_address, plan
from drafter_svc.stream import Callbacks, DraftStream
from outrider import rpc, telemetry
from outrider.config import parse
from outrider.errors import OutriderError, invalid
from outrider.extras import need_models
from outrider.messages import Hello, ModelInfo
from outrider.metrics_export import sending_metrics, serve_metrics
from outrider.tokenizer import fingerprint, load_tokenizer

if TYPE_CHECKING:
    from drafter_svc.pools.redis import RedisPool

SERVICE = "outrider.v1.Drafter"
_SERVICE_NAME = "outrider-drafter"
# On a GPU, drafts of up to so many sequences and outcomes at once are CUDA graphs.
_GRAPHED_SEQUENCES = 64

MakeFamily = Callable[[ModelInfo], Family]


async def serve(settings: DrafterSettings, place: PlacementPlan, metrics: Metrics) -> None:
    """Draft until SIGTERM or SIGINT; raises OutriderError when the verifier will never have this drafter."""
    server = rpc.Server(SERVICE)
    try:
        # Answers NOT_SERVING while the model loads.
        await server.start(settings.listen)
        serve_metrics(metrics.registry, settings)
        stream = await _stream(settings, place, server, metrics)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stream.stop)
        # What loading left behind lives as long as the process; a collection that looks at it again makes a draft late.
        gc.collect()
        gc.freeze()
        await stream.run()
    finally:
        await server.stop(0.2)
        telemetry.shutdown()


async def _stream(settings: DrafterSettings, place: PlacementPlan, server: rpc.Server, metrics: Metrics) -> DraftStream:
    """Load what drafts and make its stream, which sets the server's health."""
    make_family, identity = await _family(settings, place, metrics)
    name = metrics.drafter_id

    def hello(family: Family, info: ModelInfo) -> Hello:
        return Hello(
            drafter_id=name,
            family=family.name,
            # An n-gram drafter knows ids alone, which mean whatever they mean to the verifier.
            tokenizer_fingerprint=identity or info.tokenizer_fingerprint,
            max_depth=family.max_depth,
            distributions=family.distributions,
            placement=place.describe(family.device),
        )

    async def registered(address: str) -> None:
        await server.set_serving(True)
        print(f"drafter {name} registered with {address}", flush=True)

    def address() -> str:
        return choose_address(settings.verifier, settings.uds)

    return DraftStream(address, make_family, hello, Callbacks(registered, lambda: server.set_serving(False)), metrics)


async def _family(settings: DrafterSettings, place: PlacementPlan, metrics: Metrics) -> tuple[MakeFamily, str]:
    """How to make the family for a connection, and the tokenizer's fingerprint; imports nothing that the family does not need."""
    if settings.family == "ngram":
        return _ngram_family(settings, metrics), ""
    if settings.family == "suffix":
        return _suffix_family(settings), ""
    if not settings.model:
        raise invalid("model", "must name a directory or hub id for the family model")
    need_models()
    from drafter_svc.families.model import ModelFamily
    from outrider.grammar import GrammarCompiler
    from outrider.lm.runner import Bounds, ModelRunner

    def load() -> ModelRunner:
        runner = ModelRunner.load(
            settings.model,
            dtype=settings.dtype,
            device="cpu" if settings.placement != "local" else settings.device,
            page_count=settings.page_count,
            # The target, which may be loading on the same GPU, needs the most of it.
            cache_share=0.1,
            threads=place.threads,
            trust_remote_code=settings.trust_remote_code,
        )
        # What a sequence lacks is the token that the verifier drew, and at most its own last guess besides.
        runner.capture(Bounds(_GRAPHED_SEQUENCES, 2, settings.max_batch_tokens))
        return runner

    # Loaded on the thread that will compute; see verifier_svc.engine_thread for why.
    thread = ThreadPoolExecutor(1, thread_name_prefix="draft-model")
    runner = await asyncio.get_running_loop().run_in_executor(thread, load)

    ends = runner.eos_token_ids
    grammars = GrammarCompiler(settings.model, runner.vocab_size, ends) if settings.mask_drafts else None

    def make(info: ModelInfo) -> Family:
        return ModelFamily(
            runner,
            thread,
            info.vocab_size,
            max_batch_tokens=settings.max_batch_tokens,
            max_entries=settings.max_entries,
            grammars=grammars,
            branch_count=settings.branches,
        )

    return make, fingerprint(load_tokenizer(settings.model))


def _ngram_family(settings: DrafterSettings, metrics: Metrics) -> MakeFamily:
    from drafter_svc.families.ngram import NgramFamily
    from drafter_svc.pools.memory import MemoryPool, NgramOptions

    make_redis = _redis_pool(settings, metrics) if settings.redis is not None else None
    options = NgramOptions(settings.max_draft_len, settings.max_matching_ngram_size, settings.is_keep_all, settings.is_use_oldest)
    # Outlives the connection to a verifier, unlike all else.
    shared = MemoryPool(options, settings.pool_entries) if settings.is_public_pool else None

    return lambda info: NgramFamily(options, settings.pool_entries, shared, make_redis(info) if make_redis else None)


def _redis_pool(settings: DrafterSettings, metrics: Metrics) -> Callable[[ModelInfo], RedisPool]:
    """How to make the pool for a connection; raises OutriderError(INVALID_VALUE) that names the setting at fault."""
    from drafter_svc.pools.keys import PoolKeys, read_secret
    from drafter_svc.pools.redis import RedisCounters, RedisOptions, RedisPool
    from drafter_svc.pools.redis_server import RedisServer

    server = RedisServer.parse(settings.redis or "", settings.redis_password_file, settings.redis_ca_file)
    keys = PoolKeys(read_secret(settings.pool_secret_file), settings.namespace, public=settings.is_public_pool)
    options = RedisOptions(settings.pool_entries, settings.pool_ttl_seconds, use_oldest=settings.is_use_oldest)
    # Counts go on from one connection to the next.
    counters = RedisCounters()
    metrics.watch_redis(counters)

    def make(info: ModelInfo) -> RedisPool:
        names = info.tokenizer_fingerprint, info.vocab_size
        return RedisPool(server, keys, *names, options, counters=counters, observe=metrics.redis_lookup_seconds.observe)

    return make


def _suffix_family(settings: DrafterSettings) -> MakeFamily:
    from drafter_svc.families.suffix import SuffixFamily, SuffixOptions

    options = SuffixOptions(
        settings.max_tree_depth,
        settings.max_cached_requests,
        settings.max_spec_factor,
        settings.min_token_probability,
        settings.is_public_pool,
    )
    SuffixFamily(options)  # raises now, not when a verifier is found
    return lambda info: SuffixFamily(options)


def main() -> None:
    """Entry point; exits with status 1 and a sentence when there is no use in trying on."""
    if sys.argv[1:2] == ["erase"]:
        from drafter_svc.erase import main as erase

        erase(sys.argv[2:])
        return
    settings = parse(DrafterSettings, "drafter", sys.argv[1:])
    telemetry.setup_logging(settings.log_level)
    telemetry.setup(_SERVICE_NAME, endpoint=settings.otlp_endpoint, sample_ratio=settings.trace_sample_ratio)
    metrics = Metrics(settings.id or f"{settings.family}-{platform.node()}-{os.getpid()}", settings.family)
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
