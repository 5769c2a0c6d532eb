"""`python -m drafter_svc`: takes its place on the machine, then drafts for a verifier until told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import platform
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import uvloop

from drafter_svc.config import DrafterSettings
from drafter_svc.families.base import Family
from drafter_svc.placement import PlacementPlan, choose_address, plan
from drafter_svc.stream import Callbacks, DraftStream
from outrider import rpc, telemetry
from outrider.config import parse
from outrider.errors import OutriderError, invalid
from outrider.extras import need_models
from outrider.messages import Hello, ModelInfo
from outrider.tokenizer import fingerprint, load_tokenizer

SERVICE = "outrider.v1.Drafter"

MakeFamily = Callable[[ModelInfo], Family]


async def serve(settings: DrafterSettings, place: PlacementPlan) -> None:
    """Draft until SIGTERM or SIGINT; raises OutriderError when the verifier will never have this drafter."""
    server = rpc.Server(SERVICE)
    try:
        # Answers NOT_SERVING while the model loads.
        await server.start(settings.listen)
        stream = await _stream(settings, place, server)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stream.stop)
        # What loading left behind lives as long as the process; a collection that looks at it again makes a draft late.
        gc.collect()
        gc.freeze()
        await stream.run()
    finally:
        await server.stop(0.2)
        telemetry.shutdown()


async def _stream(settings: DrafterSettings, place: PlacementPlan, server: rpc.Server) -> DraftStream:
    """Load what drafts and make its stream, which sets the server's health."""
    make_family, identity = await _family(settings, place)
    name = settings.id or f"{settings.family}-{platform.node()}-{os.getpid()}"

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

    return DraftStream(address, make_family, hello, Callbacks(registered, lambda: server.set_serving(False)))


async def _family(settings: DrafterSettings, place: PlacementPlan) -> tuple[MakeFamily, str]:
    """How to make the family for a connection, and the tokenizer's fingerprint; imports nothing that the family does not need."""
    if settings.family == "ngram":
        return _ngram_family(settings), ""
    if settings.family == "suffix":
        return _suffix_family(settings), ""
    if not settings.model:
        raise invalid("model", "must name a directory or hub id for the family model")
    need_models()
    from drafter_svc.families.model import ModelFamily
    from outrider.grammar import GrammarCompiler
    from outrider.lm.runner import ModelRunner

    def load() -> ModelRunner:
        runner = ModelRunner.load(
            settings.model,
            dtype=settings.dtype,
            device="cpu" if settings.placement != "local" else settings.device,
            page_count=settings.page_count,
            threads=place.threads,
            trust_remote_code=settings.trust_remote_code,
        )
        runner.warm_up()
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


def _ngram_family(settings: DrafterSettings) -> MakeFamily:
    from drafter_svc.families.ngram import NgramFamily
    from drafter_svc.pools.memory import MemoryPool, NgramOptions
    from drafter_svc.pools.redis import RedisOptions, RedisPool

    if settings.redis is not None and not settings.is_public_pool:
        raise invalid("redis", "holds the public pool, so it goes with is-public-pool")
    options = NgramOptions(settings.max_draft_len, settings.max_matching_ngram_size, settings.is_keep_all, settings.is_use_oldest)
    # Outlives the connection to a verifier, unlike all else.
    shared = MemoryPool(options, settings.pool_entries) if settings.is_public_pool else None

    def make(info: ModelInfo) -> Family:
        redis = None
        if settings.redis is not None:
            url, age_s = settings.redis, settings.pool_ttl_seconds
            remote = RedisOptions(url, settings.namespace, settings.pool_entries, age_s, use_oldest=settings.is_use_oldest)
            redis = RedisPool(remote, info.tokenizer_fingerprint, info.vocab_size)
        return NgramFamily(options, settings.pool_entries, shared, redis)

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
    settings = parse(DrafterSettings, "drafter", sys.argv[1:])
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    telemetry.setup("outrider-drafter", endpoint=settings.otlp_endpoint, sample_ratio=settings.trace_sample_ratio)
    try:
        # Before torch is imported: it sizes its thread pools by the cores it sees, and memory stays where it was first touched.
        place = plan(settings.placement, settings.cores, settings.numa_node, settings.threads)
        place.apply()
        uvloop.run(serve(settings, place))
    except OutriderError as error:
        raise SystemExit(f"drafter: {error}") from error


if __name__ == "__main__":
    main()
