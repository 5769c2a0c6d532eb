"""The gateway's settings: flags, OUTRIDER_GATEWAY_… in the environment, or a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from outrider.errors import OutriderError
from outrider.process.network.addresses import check_address
from outrider.process.security.exposure import check_exposure, host_of
from outrider.process.security.tls import Tls, TlsSettings
from outrider.process.settings.config import ServiceSettings


class GatewaySettings(TlsSettings, ServiceSettings):
    """Serve the OpenAI API and gRPC in front of verifiers.

    Each setting may also come from the environment (OUTRIDER_GATEWAY_TOKENIZER) or a YAML file
    (--config).
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_GATEWAY_")

    groups: ClassVar[Mapping[str, str]] = {
        "verifier": "Model",
        "http_host": "Addresses",
        "keys_file": "Who may call",
        "public_tls_cert": "TLS for clients",
        "allowed_hosts": "Browsers and other websites",
        "speculation_metrics": "Requests",
        "drain_seconds": "Process",
    }

    verifier: list[str] = Field(min_length=1)
    """Addresses of the verifier's replicas: host:port, unix:/path, or dns:NAME:PORT for all
    addresses of NAME, which the gateway follows. Separate them with commas or repeat the flag. A
    request goes to the ready replica that probably has most of its prompt cached, unless that
    replica is clearly busier than the others. Without such a replica, it goes to the least busy
    replica."""

    tokenizer: str
    """Directory, GGUF file or hub id of tokenizer and chat template. Both must be the target's."""

    tool_format: str = ""
    """Format in which the model writes tool calls, such as hermes or qwen_3_coder. docs/api.md
    lists the formats. By default the gateway guesses it from the chat template, and logs its guess.
    The value `none` means that the model has no format of its own; then only forced calls work."""

    http_host: str = "127.0.0.1"
    """Address the OpenAI API listens on; 0.0.0.0 lets other machines in."""

    http_port: int = Field(default=8000, ge=0, le=65535)
    """Port the OpenAI API listens on. 0 takes a free one."""

    grpc_listen: str = "127.0.0.1:8001"
    """host:port or unix:/path that gRPC listens on, for clients of GenerationService."""

    keys_file: Path | None = None
    """YAML or JSON file with the hashes of API keys; `outrider keys` writes it. It is read again
    when it changes."""

    keys: str = ""
    """Text in the form of `keys_file`, for an environment that holds secrets. Its keys are valid in
    addition to the file's keys."""

    open: bool = False
    """Let everybody in without a key, on addresses beyond the loopback interface too."""

    published_on: str = ""
    """The host's address on which this container's ports are published. This address, and not the
    listening addresses, then decides whether keys are needed."""

    public_tls_cert: Path | None = None
    """PEM file with the certificate that clients see on the HTTP and gRPC ports, followed by its
    intermediate certificates. With this file and public-tls-key, both ports use TLS. Changed files
    are read again without a restart."""

    public_tls_key: Path | None = None
    """PEM file with the certificate's key."""

    public_tls_ca: Path | None = None
    """PEM file with the authorities (CAs) of clients' certificates. If it is given, every client
    must show a certificate that one of these authorities signed."""

    allowed_hosts: list[str] = Field(default_factory=list)
    """Names under which clients reach the gateway, such as llm.example.com or *.example.com.
    IP addresses, localhost and the name in http_host are always allowed. Names without a dot are
    allowed unless the gateway listens only on the loopback interface. * allows all."""

    allowed_origins: list[str] = Field(default_factory=list)
    """Origins of other websites whose scripts may call the gateway (CORS), such as
    https://chat.example.com or http://localhost:*. * allows all."""

    speculation_metrics: bool = False
    """Put `metrics.speculative_decoding` into every answer over HTTP, for load generators that read
    acceptance there (guidellm, aiperf). Otherwise only requests with `speculation.metrics` get
    it."""

    unknown_parameters: Literal["refuse", "ignore"] = "refuse"
    """How the gateway treats a parameter that it does not know. With refuse it answers 400, so that
    no setting is lost in silence. Ignore is for clients that send parameters of other servers."""

    ping_seconds: float = Field(default=15.0, ge=0.0)
    """A stream that has sent nothing for this long sends a ping, before its first token too, so
    that proxies keep the connection. Most proxies give up after 60 s. 0 turns pings off."""

    keep_alive_seconds: float = Field(default=75.0, gt=0.0)
    """How long a connection may stay idle after an answer. A proxy should close idle connections
    sooner, or some of its requests meet a closed connection; most proxies do so after 60 s. At most
    1,024 connections stay idle; a further idle connection closes the longest idle connection."""

    patience_seconds: float = Field(default=60.0, ge=0.0)
    """How long callers that choose no timeout wait for their first token. A request that might wait
    longer in the queue is refused at once with 429, where possible before its body is read. 0 lets
    callers wait for ever."""

    resume_seconds: float = Field(default=30.0, ge=0.0)
    """How long a sequence that has begun and has lost its verifier waits for a verifier that
    continues it: another replica, or the same replica after a restart. A model that loads for
    longer needs a higher value."""

    drain_seconds: float = Field(default=10.0, ge=0.0)
    """After SIGTERM, how long running requests may take before the gateway cuts them off. Whoever
    sends SIGTERM must wait for longer before SIGKILL."""

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        listens = [self.http_host, host_of(self.grpc_listen)]
        if self.published_on:
            listens = [self.published_on.strip("[]")]
        # Clients that must show a certificate are known, like clients with a key.
        has_keys = bool(self.keys_file or self.keys)
        if self.open and self.public_tls_ca and not has_keys:
            raise ValueError(
                "open lets everybody in, but public-tls-ca asks clients for certificates;"
                " give one of the two"
            )
        check_exposure(listens, has_keys=has_keys or bool(self.public_tls_ca), is_open=self.open)
        return self

    @property
    def public_tls(self) -> Tls | None:
        """TLS of the HTTP and gRPC ports; None if they have none.

        Raises OutriderError(INVALID_VALUE) that names a missing or bad file.
        """
        return Tls.of_server(
            self.public_tls_cert, self.public_tls_key, self.public_tls_ca, "public-tls"
        )

    @model_validator(mode="after")
    def _check_public_tls(self) -> Self:
        try:
            _ = self.public_tls
        except OutriderError as error:
            raise ValueError(error.message) from error
        return self

    @field_validator("verifier", "allowed_hosts", "allowed_origins")
    @classmethod
    def _one_by_one(cls, texts: list[str], info: ValidationInfo) -> list[str]:
        entries = [entry.strip() for text in texts for entry in text.split(",")]
        if not all(entries):
            wanted = "addresses" if info.field_name == "verifier" else "names"
            raise ValueError(f"must list {wanted}, with nothing empty between commas")
        if info.field_name == "verifier":
            for entry in entries:
                check_address(entry)
        return entries
