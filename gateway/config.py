"""The gateway's settings: flags, OUTRIDER_GATEWAY_… in the environment, or a YAML file."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from outrider.process.config import ServiceSettings


class GatewaySettings(ServiceSettings):
    """Settings of `python -m gateway`."""

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_GATEWAY_")

    verifier: list[str] = Field(min_length=1)
    """Addresses of the verifier's replicas, host:port or unix:/path. Separate them with commas or
    repeat the flag. A request goes to the least busy replica that is ready."""

    tokenizer: str
    """Model directory or hub id of the tokenizer and chat template. It must be the target's."""

    model_name: str = ""
    """Name that requests use for the model. Empty takes the verifier's name."""

    http_host: str = "127.0.0.1"
    """Address the OpenAI API listens on."""

    http_port: int = Field(default=8000, ge=0, le=65535)
    """Port the OpenAI API listens on. 0 takes a free one."""

    grpc_listen: str = "127.0.0.1:8001"
    """host:port or unix:/path that gRPC listens on."""

    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Largest HTTP request body in bytes. A gRPC request may have half as many."""

    max_sequences: int = Field(default=64, ge=1, le=1024)
    """Most sequences of one request: prompts times n."""

    header_seconds: float = Field(default=10.0, gt=0)
    """How long a connection may take to send the headers of a request."""

    body_seconds: float = Field(default=60.0, gt=0)
    """How long a request's body may take to arrive."""

    keep_alive_seconds: float = Field(default=5.0, gt=0)
    """How long a connection may stay idle after an answer."""

    allowed_hosts: list[str] = Field(default_factory=list)
    """Names under which clients reach the gateway, such as llm.example.com or *.example.com.
    IP addresses, localhost and the name in http_host are always allowed. Names without a dot are
    allowed unless the gateway listens on the loopback interface alone. * allows all."""

    allowed_origins: list[str] = Field(default_factory=list)
    """Origins of other websites whose scripts may call the gateway (CORS), such as
    https://chat.example.com or http://localhost:*. * allows all."""

    resume_seconds: float = Field(default=30.0, ge=0.0)
    """How long a sequence that has begun and has lost its verifier waits for one that continues it:
    another replica, or the same one after a restart."""

    drain_seconds: float = Field(default=10.0, ge=0.0)
    """After SIGTERM, how long running requests may take before the gateway cuts them off."""

    @field_validator("verifier", "allowed_hosts", "allowed_origins")
    @classmethod
    def _one_by_one(cls, texts: list[str], info: ValidationInfo) -> list[str]:
        entries = [entry.strip() for text in texts for entry in text.split(",")]
        if not all(entries):
            wanted = "host:port or unix:/path" if info.field_name == "verifier" else "names"
            raise ValueError(f"must name {wanted}, and nothing empty between commas")
        return entries
