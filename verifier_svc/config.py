"""The verifier's settings: flags, OUTRIDER_VERIFIER_* in the environment, or YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from outrider.process.security.exposure import check_verifier_exposure, host_of
from outrider.process.security.tls import TlsSettings
from outrider.process.settings.config import Device, Dtype, ScrapedSettings
from outrider.protocol.draft_tokens_policy import DraftTokensSetting
from outrider.protocol.messages import SampledRule

EngineName = Literal["native", "vllm"]


class TargetSettings(BaseModel):
    """Settings of the verifier that `outrider serve` takes under the same names."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    groups: ClassVar[Mapping[str, str]] = {"model_name": "Model", "draft_tokens": "Drafts"}

    model_name: list[str] = Field(default=[])
    """Name of the model in requests; by default the value of `target`. Repeat it, or separate names
    with commas, to serve the model under several names; answers and metrics have the first."""

    engine: EngineName = "native"
    """The engine of the target: native, Outrider's own; or vllm, for models that need
    several GPUs and for architectures that the native engine lacks. docs/models.md compares the
    two engines."""

    tensor_parallel: int = Field(1, ge=1)
    """With the engine vllm, the number of devices over which each layer is divided."""

    engine_arg: list[str] = Field(default=[])
    """With the engine vllm, further arguments of `vllm.EngineArgs`, as in
    gpu_memory_utilization=0.8 or quantization=fp8; repeat it for more arguments."""

    device: Device = "auto"
    """The target's device: auto (CUDA if there is any), cpu, cuda or cuda:N."""

    draft_tokens: DraftTokensSetting = "goodput"
    """Draft tokens that one step verifies for a sequence, unless the request says otherwise:
    goodput (the fastest number by measured acceptance and costs, at most 8; goodput:MAX for another
    bound), auto (TensorRT-LLM's heuristic by batch size) or fixed:K."""

    sampled_drafts: bool = False
    """Let trusted drafters sample for requests without a seed, and accept these drafts by the
    distribution that the drafter claims. A trusted drafter that claims a false distribution can
    bias the output.
    With TLS, drafters whose certificates have the role trusted-drafter are trusted; without TLS,
    all that connect. Other drafters then propose their likeliest tokens for these requests. Without
    this setting, drafters draw with the verifier's noise if they can."""

    @field_validator("model_name")
    @classmethod
    def _separate_names(cls, texts: list[str]) -> list[str]:
        names = [name.strip() for text in texts for name in text.split(",")]
        return [name for name in dict.fromkeys(names) if name]


class VerifierSettings(TargetSettings, TlsSettings, ScrapedSettings):
    """Hold the target model, and accept the draft tokens that it agrees with.

    Each setting may also come from the environment (OUTRIDER_VERIFIER_TARGET) or a YAML file
    (--config).
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_VERIFIER_")

    groups: ClassVar[Mapping[str, str]] = {
        "target": "Model",
        "always_draft": "Drafts",
        "prefix_caching": "Batches and memory",
        "sampled_rule": "Drafts",
        "dtype": "Model",
        "feature_states": "Heads",
        "threads": "Model",
        "listen": "Addresses",
        "max_batch_tokens": "Batches and memory",
        "synthetic_acceptance_rates": "Drafts",
        "drain_seconds": "Process",
    }

    target: str
    """Directory, GGUF file or hub id of the target model."""

    always_draft: bool = False
    """Wait for every draft, at most a second per step, and pause no drafter, even where that is
    slower: to measure drafters, not to serve."""

    prefix_caching: bool = True
    """Share pages of the KV cache between prompts of a tenant that begin alike, so that a common
    beginning is computed once. Turn it off where no cache may outlive its request."""

    sampled_rule: SampledRule = "block"
    """Acceptance rule for drafts that a trusted drafter sampled. On average, block accepts at least
    as many tokens as token-wise; use token-wise only to compare."""

    draft_trees: bool = True
    """Verify trees of draft tokens, at most 64 of a sequence, where they are faster than chains.
    Drafts that a trusted drafter sampled stay chains. Turn it off to compare trees with chains."""

    dtype: Dtype = "auto"
    """Type of the weights and of the computation; auto takes the checkpoint's."""

    feature_states: list[int] = Field(default=[])
    """Hidden states that drafters with a head may read. k is the input of layer k, from 0 on (with
    vLLM from 1 on); the number of layers is the last layer's output; -1 is the state after the
    final norm, which vLLM always keeps. Name the states if the target runs on a GPU, where CUDA
    graphs keep only states named before their capture, or with vLLM on any device. Elsewhere
    drafters may read every state."""

    feature_projection: list[str] = Field(default=[])
    """Directories of heads whose first matrix this verifier applies to the hidden states before it
    sends them. The product takes a third to a fifth of the bytes of the states. The target's device
    computes the product for each token. `feature_states` need not name the states of these
    heads."""

    threads: int | None = Field(None, ge=1)
    """Number of Torch's threads on a CPU; by default Torch chooses. A lower number leaves cores to
    drafters on the same host."""

    trust_remote_code: bool = False
    """Run the checkpoint's own code, for architectures that transformers lacks. That code may do
    all that this process may do."""

    listen: str = "127.0.0.1:50051"
    """host:port to serve on."""

    open: bool = False
    """Let everybody in without TLS, on addresses beyond the loopback interface."""

    published_on: str = ""
    """Address of the host on which a container's port is published. This address, and not
    `listen`, then decides whether TLS or `open` is needed."""

    uds: Path | None = None
    """Unix socket to serve on as well, for drafters on this host."""

    max_batch_tokens: int = Field(512, ge=1)
    """Largest number of tokens in one forward; longer prompts are processed in chunks. A larger
    number reads prompts faster, but delays the running sequences more."""

    max_sequences: int = Field(64, ge=1, le=4096)
    """Largest number of sequences in one batch; further sequences wait. A larger batch raises
    throughput and slows each sequence down."""

    max_drafters: int = Field(64, ge=1)
    """Largest number of connected drafters; the verifier refuses further drafters. At most a
    quarter of this number may have certificates of the same name, or without TLS connect from the
    same address."""

    page_count: int | None = Field(None, ge=1)
    """Pages of the KV cache; by default as many as the free memory allows. Set it where other
    processes need memory later."""

    gpu_memory_share: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory that this process takes at most: for the weights, the KV cache and
    the largest step. Drafters on the same GPU need the rest. Unused with `page_count`."""

    synthetic_acceptance_rates: list[Annotated[float, Field(ge=0, le=1)]] = Field(default=[])
    """For benchmarks only: accept drafts by chance, whatever the target says. Rate i is the
    probability that the first i tokens of a draft are accepted; rates may not rise. Each token
    beyond the last rate multiplies the probability by the ratio of the last two rates, so a single
    rate is the acceptance of every token. Every response is marked."""

    drain_seconds: float = Field(10.0, ge=0)
    """Longest time for running requests to finish after SIGTERM."""

    @field_validator("synthetic_acceptance_rates")
    @classmethod
    def _fall(cls, rates: list[float]) -> list[float]:
        if rates != sorted(rates, reverse=True):
            raise ValueError(
                "the rates may not rise: a longer part of a draft is accepted less often"
            )
        return rates

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        host = self.published_on.strip("[]") or host_of(self.listen)
        remedy = (
            "give --tls-cert, --tls-key and --tls-ca (`outrider certs` makes them), "
            "or --open to let everybody in"
        )
        has_tls = self.tls_cert is not None
        check_verifier_exposure(host, has_tls=has_tls, is_open=self.open, remedy=remedy)
        return self

    @property
    def acceptance_settings(self) -> dict[str, str]:
        """Return the settings that decide how tokens are drawn and drafts accepted, keyed by flag.

        Only a verifier with equal settings may continue this verifier's answers. For example,
        drafters may know the noise of an answer that began without sampled drafts. Drafters that
        know this noise must not sample for the answer.
        """
        names = (
            "sampled_drafts",
            "sampled_rule",
            "synthetic_acceptance_rates",
        )
        values = {name.replace("_", "-"): getattr(self, name) for name in names}
        return {
            flag: value if isinstance(value, str) else json.dumps(value)
            for flag, value in values.items()
        }

    @property
    def served_names(self) -> list[str]:
        """The names by which requests may call the target. Answers contain the first name."""
        return self.model_name or [self.target]
