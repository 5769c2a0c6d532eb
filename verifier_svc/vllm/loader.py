"""Loads vLLM in the verifier's process, with our scheduler and our noise."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider import __version__
from outrider.errors import OutriderError, Reason, invalid
from outrider.gguf import pretrained
from outrider.grammar.compiler import GrammarCompiler
from outrider.lm.weights_fingerprint import weights_fingerprint
from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
from outrider.protocol.model_info import ModelInfo, Stage, with_fingerprint
from outrider.tokenizer import end_token_ids, fingerprint, load_tokenizer
from verifier_svc.config import VerifierSettings
from verifier_svc.engine.outbox import Delivery
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.policy.draft_policy import EVERY_DRAFT, PAYING_DRAFTS
from verifier_svc.streams.in_process_stream import InProcessDrafter
from verifier_svc.streams.servicer import VerifierServicer
from verifier_svc.vllm import features, parameters, plugin, runner, versions
from verifier_svc.vllm.engine import VllmEngine
from verifier_svc.vllm.hub import DraftHub, Limits

# Settings of the native engine that vLLM lacks, each with the value that changes nothing.
_NATIVE_ONLY = {
    "device": "auto",
    "sampled_rule": "block",
    "sampled_drafts": False,
    "synthetic_acceptance_rates": [],
    "page_count": None,
}
# Arguments that Outrider sets, because drafts, noise and log probabilities depend on them.
_OURS = (
    "scheduler_cls",
    "async_scheduling",
    "logits_processors",
    "logprobs_mode",
    "stream_interval",
    "pipeline_parallel_size",
)


class VllmLoader:
    """Like `verifier_svc.server.Loader`, for vLLM's engine."""

    def __init__(
        self,
        settings: VerifierSettings,
        servicer: VerifierServicer,
        metrics: VerifierMetrics,
        in_process_drafters: Sequence[InProcessDrafter] = (),
    ) -> None:
        """Raises OutriderError for settings that vLLM lacks, and for an unsupported vLLM."""
        versions.check_version(installed_version())
        for name, nothing in _NATIVE_ONLY.items():
            if getattr(settings, name) != nothing:
                raise invalid(name, "is for the native engine alone; vLLM has no such setting")
        self._settings = settings
        self._in_process_drafters = in_process_drafters
        self._servicer = servicer
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self.info = servicer.info
        self.grammars: GrammarCompiler | None = None

    def build(self, deliver: Callable[[list[Delivery]], None]) -> VllmEngine:
        """Build the engine, ready to run; raise OutriderError if vLLM cannot serve the target."""
        for_drafters = [
            state for drafter in self._in_process_drafters for state in drafter.meet(None)
        ]
        states = [*self._settings.feature_states, *for_drafters]
        settings = self._settings.model_copy(update={"feature_states": states})
        policy = DraftTokensPolicy.parse(settings.draft_tokens)
        self._report(Stage.LOADING, "vLLM loads the target")
        made: list[DraftHub] = []

        def make_hub(config: Any) -> DraftHub:
            limits = Limits(
                config.model_config.get_vocab_size(),
                config.scheduler_config.max_num_seqs,
                max_drafters=settings.max_drafters,
            )
            drafts = EVERY_DRAFT if settings.always_draft else PAYING_DRAFTS
            made.append(
                DraftHub(
                    limits,
                    policy,
                    self._metrics,
                    deliver,
                    drafts,
                    target_device=plugin.target_device(config),
                    states=features.states_for(config, settings),
                )
            )
            return made[0]

        with plugin.own_hub(settings, make_hub):
            llm = self._load(policy)
        model = llm.vllm_config.model_config
        eos = end_token_ids(settings.target, model.get_vocab_size())
        self.info = self._info(llm, policy, eos)
        engine = VllmEngine(llm, made[0], eos)
        self.grammars = GrammarCompiler(settings.target, self.info.vocab_size, eos)
        self._report(Stage.WARMING_UP, "running trial steps")
        engine.warm_up()
        self.grammars.start_workers()
        return engine

    def _report(self, stage: Stage, detail: str) -> None:
        self._loop.call_soon_threadsafe(self._servicer.report, stage, detail)

    def _load(self, policy: DraftTokensPolicy) -> Any:
        # Our scheduler has to be in this process, where the drafters' streams are.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        settings = self._settings
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        arguments: dict[str, Any] = {
            "model": pretrained(settings.target),
            "dtype": settings.dtype,
            "seed": 0,
            "enable_prefix_caching": settings.prefix_caching,
            "max_num_seqs": settings.max_sequences,
            "gpu_memory_utilization": settings.gpu_memory_share,
            "trust_remote_code": settings.trust_remote_code,
            "tensor_parallel_size": settings.tensor_parallel,
            "disable_log_stats": True,
            # The library of our own grammars. "auto" would take XGrammar.
            "structured_outputs_config": {"backend": "guidance"},
        }
        if "max_batch_tokens" in settings.model_fields_set:
            arguments["max_num_batched_tokens"] = settings.max_batch_tokens
        arguments |= _read(settings.engine_arg)
        own_drafter = arguments.pop("speculative_config", None)
        arguments |= runner.engine_arguments(
            policy.max_draft_tokens, v2=runner.uses_v2(), own_drafter=own_drafter
        )
        # In an environment without our package's metadata, vLLM does not load our plugin.
        runner.install()
        try:
            return LLMEngine.from_engine_args(EngineArgs(**arguments))
        except TypeError as error:
            raise invalid("engine_arg", f"vLLM's EngineArgs refuses it: {error}") from error
        except (ValueError, RuntimeError, OSError) as error:
            message = f"vLLM cannot serve {settings.target}: {error}"
            raise OutriderError(Reason.INVALID_VALUE, message, "target") from error

    def _info(self, llm: Any, policy: DraftTokensPolicy, eos: tuple[int, ...]) -> ModelInfo:
        config = llm.vllm_config
        model = config.model_config
        # A verifier continues another verifier's answer only if both have the same engine,
        # arguments of vLLM and number of devices.
        settings = self._settings.acceptance_settings | {
            "engine": f"vllm {installed_version()}",
            "engine-arg": " ".join(sorted(self._settings.engine_arg)),
            "tensor-parallel": str(self._settings.tensor_parallel),
        }
        return with_fingerprint(
            ModelInfo(
                model_id=self.info.model_id,
                aliases=self.info.aliases,
                stage=Stage.READY,
                stage_detail="serving",
                tokenizer_fingerprint=fingerprint(load_tokenizer(self._settings.target)),
                vocab_size=model.get_vocab_size(),
                context_length=model.max_model_len,
                eos_token_ids=eos,
                dtype=str(model.dtype).removeprefix("torch."),
                device=str(config.device_config.device),
                max_draft_tokens=policy.max_draft_tokens,
                weights_fingerprint=weights_fingerprint(pretrained(self._settings.target)),
                acceptance_settings=tuple(sorted(settings.items())),
                server_version=__version__,
                engine=f"vllm {installed_version()}",
                unsupported=parameters.UNSUPPORTED,
            )
        )


def installed_version() -> str:
    """Return vLLM's version. Raises OutriderError(INVALID_VALUE) if vLLM is not installed."""
    try:
        import vllm
    except ImportError as error:
        hint = "vllm is not installed; pip install 'outrider[vllm]' in an environment of its own"
        raise invalid("engine", hint) from error
    return str(vllm.__version__)


def _read(texts: list[str]) -> dict[str, Any]:
    """Parse `KEY=VALUE` arguments. A value is read as JSON if it is JSON, else as a string."""
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise invalid("engine_arg", f"must be KEY=VALUE, not {text!r}")
        if name in _OURS:
            raise invalid("engine_arg", f"{name} is set by Outrider itself")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    if not isinstance(arguments.get("speculative_config", {}), dict):
        raise invalid("engine_arg", "speculative_config must be a JSON object")
    return arguments
