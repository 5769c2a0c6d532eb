"""What `outrider serve` runs: its settings, and the command line of each process that follows from them."""

from __future__ import annotations

import os
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from drafter_svc.config import DrafterSettings, required_setting, settings_schema
from drafter_svc.families.registry import find_family, known_families
from outrider.draft_tokens_policy import DraftTokensSetting
from outrider.errors import OutriderError, Reason, invalid
from outrider.launch.supervisor import Child
from outrider.process.config import Device, Dtype, ScrapedSettings, ServiceSettings, load
from outrider.process.cores import parse_cores
from outrider.process.usage import suggestion

# Settings of this command that drafters of families with a Redis are given.
_REDIS = ("redis", "redis_password_file", "redis_ca_file", "pool_secret_file")


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """`FAMILY[=VALUE][,key=value...]`: VALUE is the one setting that the family cannot do without, as in `model=PATH`.

    The keys are the drafter's own settings, whose values may have commas: `cores=0,2,4-7`.
    """

    family: str
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> DrafterSpec:
        """Raises OutriderError(INVALID_VALUE) that shows what a drafter looks like."""
        head, *pairs = text.split(",")
        family, _, value = head.partition("=")
        options: dict[str, str] = {}
        for pair in pairs:
            key, given, option = pair.partition("=")
            if given or not options:
                options[key.replace("-", "_")] = option
            else:
                last = next(reversed(options))
                options[last] = options[last] and f"{options[last]},{pair}"
        if not all(key and option for key, option in options.items()):
            raise invalid(
                "drafter",
                f"must be {', '.join(known_families())} or package.module:Class, then key=value, not {text!r}",
            )
        return cls(family, _required(family, value) | options)

    @property
    def schema(self) -> type[DrafterSettings]:
        """What the drafter's process takes."""
        return settings_schema(self.family)

    @property
    def runs_model(self) -> bool:
        """Whether the drafter computes with a model of its own, and so needs cores."""
        return "device" in self.schema.model_fields

    @property
    def shares_redis(self) -> bool:
        """Whether the drafter can share what it learns through a Redis."""
        return "redis" in self.schema.model_fields


def _required(family: str, value: str) -> dict[str, str]:
    try:
        required = required_setting(settings_schema(family))
    except OutriderError as error:
        raise OutriderError(Reason.INVALID_VALUE, error.message, "drafter") from error
    if required is None and value:
        raise invalid(
            "drafter",
            f"{family}={value}: {family} takes no value; its settings follow as key=value after commas",
        )
    if required is not None and not value:
        raise invalid(
            "drafter", f"{family} needs its {required}, as in {family}={required.upper()}"
        )
    return {required: value} if required is not None else {}


class ServeSettings(ServiceSettings):
    """Run a verifier, drafters and a gateway on this host until Ctrl-C.

    Each setting may also come from the environment (OUTRIDER_TARGET) or a YAML file (--config). TARGET is the same as --target.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_")

    argument: ClassVar = "target"

    target: str
    """Directory or hub id of the target model."""

    drafter: list[str] = Field(default_factory=list)
    """ngram, suffix, model=PATH, or another family by its name or package.module:Class; its own settings follow after commas:
    model=PATH,placement=cpu,cores=0-3. Repeat it for more."""

    dtype: Dtype = "auto"
    """Weights of target and draft models: auto is the checkpoint's."""

    device: Device = "auto"
    """The target's device: auto (CUDA when there is any), cpu, cuda or cuda:N."""

    host: str = "127.0.0.1"
    """Address that the gateway listens on."""

    http_port: int = Field(8000, ge=0, le=65535)
    """Port of the OpenAI API; 0 takes a free one."""

    grpc_port: int = Field(8001, ge=0, le=65535)
    """Port of the gateway's gRPC service; 0 takes a free one."""

    allowed_hosts: list[str] = Field(default_factory=list)
    """Names under which clients reach the gateway, such as llm.example.com or *.example.com, beside addresses and localhost; *
    allows all names."""

    allowed_origins: list[str] = Field(default_factory=list)
    """Origins of other websites whose scripts may call the gateway (CORS), such as http://localhost:*; * allows all."""

    verifier_host: str = "127.0.0.1"
    """Address that the verifier listens on, for drafters that are started by hand; 0.0.0.0 lets other machines in."""

    verifier_port: int = Field(50051, ge=0, le=65535)
    """Port of the verifier; 0 takes a free one."""

    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of the verifier's /metrics on the loopback interface; 0 is off."""

    draft_tokens: DraftTokensSetting = "goodput"
    """Draft tokens of a sequence verified in one step, unless its request says otherwise: goodput (what is measured to be fastest,
    at most 8; goodput:MAX for another bound), auto (TensorRT-LLM's heuristic by batch size) or fixed:K."""

    threads: int | None = Field(None, ge=1)
    """Threads of the target on a CPU; unset leaves a core to each draft model."""

    prefix_caching: bool = True
    """Share pages of the KV cache between prompts that begin alike."""

    trust_draft_distributions: bool = False
    """Let draft models sample, and judge them by the distribution they claim."""

    always_draft: bool = False
    """Wait for every draft and pause no drafter, whether that pays or not: to measure drafters, not to serve."""

    sampled_rule: Literal["block", "token-wise"] = "block"
    """Rule for drafts that a trusted draft model sampled."""

    grammar_backend: Literal["xgrammar", "llguidance"] = "xgrammar"
    """What compiles grammars and computes their masks; llguidance knows no structural tags."""

    redis: str | None = None
    """URL of a Redis in which n-gram drafters share what they learn of each tenant, in any form that a drafter's `--redis` takes;
    for all tenants in common, `--drafter ngram,is_public_pool=true`."""

    redis_password_file: Path | None = None
    """File with the password of the Redis user."""

    redis_ca_file: Path | None = None
    """PEM file with the authorities that may have signed the Redis servers' certificates."""

    pool_secret_file: Path | None = None
    """File with the secret that keys in Redis are made with; redis needs it."""

    @model_validator(mode="after")
    def _check_redis(self) -> Self:
        if self.redis is None:
            given = [name.replace("_", "-") for name in _REDIS if getattr(self, name) is not None]
            if given:
                raise ValueError(f"{given[0]} has no meaning without --redis URL")
            return self
        if not any(DrafterSpec.parse(text).shares_redis for text in self.drafter):
            raise ValueError("redis is for n-gram drafters, and there is none; add --drafter ngram")
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


@dataclass(frozen=True, slots=True)
class Stack:
    """The children in the order to start them, and where they listen."""

    children: list[Child]
    http_url: str
    grpc_address: str
    verifier_address: str


def plan_stack(settings: ServeSettings, socket_directory: Path) -> Stack:
    """Raises OutriderError(INVALID_VALUE) that names the port when it is in use."""
    http_port = _port("http_port", settings.host, settings.http_port)
    grpc_port = _port("grpc_port", settings.host, settings.grpc_port)
    verifier_port = _port("verifier_port", settings.verifier_host, settings.verifier_port)
    # Who listens on all addresses listens on the loopback interface.
    verifier = f"{'127.0.0.1' if settings.verifier_host == '0.0.0.0' else settings.verifier_host}:{verifier_port}"
    uds = socket_directory / "verifier.sock"
    specs = [DrafterSpec.parse(text) for text in settings.drafter]
    children = [
        Child(
            "verifier",
            "verifier_svc",
            _verifier_arguments(settings, specs, f"{settings.verifier_host}:{verifier_port}", uds),
        ),
        *(
            Child(name, "drafter_svc", arguments)
            for name, arguments in _drafters(settings, specs, verifier, uds)
        ),
        Child("gateway", "gateway", _gateway_arguments(settings, verifier, http_port, grpc_port)),
    ]
    common = ["--log-level", settings.log_level]
    if settings.otlp_endpoint:
        common += [
            "--otlp-endpoint",
            settings.otlp_endpoint,
            "--trace-sample-ratio",
            str(settings.trace_sample_ratio),
        ]
        common += ["--otlp-metrics-seconds", str(settings.otlp_metrics_seconds)]
    for child in children:
        child.arguments += common
    return Stack(
        children, f"http://{settings.host}:{http_port}", f"{settings.host}:{grpc_port}", verifier
    )


def _verifier_arguments(
    settings: ServeSettings, specs: list[DrafterSpec], address: str, uds: Path
) -> list[str]:
    arguments = [
        "--target",
        settings.target,
        "--dtype",
        settings.dtype,
        "--device",
        settings.device,
        "--listen",
        address,
    ]
    threads = str(settings.threads or _free_cores(specs))
    arguments += ["--uds", str(uds), "--draft-tokens", settings.draft_tokens, "--threads", threads]
    arguments += ["--metrics-port", str(settings.metrics_port)]
    arguments += [] if settings.prefix_caching else ["--no-prefix-caching"]
    arguments += ["--always-draft"] if settings.always_draft else []
    arguments += [
        "--sampled-rule",
        settings.sampled_rule,
        "--grammar-backend",
        settings.grammar_backend,
    ]
    return [
        *arguments,
        *(["--trust-draft-distributions"] if settings.trust_draft_distributions else []),
    ]


def _free_cores(specs: list[DrafterSpec]) -> int:
    """How many cores draft models leave to the target: two processes whose threads meet at barriers on the same ones hold each
    other up.
    """
    # In a container these can be fewer than the machine has.
    mine = os.sched_getaffinity(0)
    models = [spec for spec in specs if spec.runs_model]
    pinned = [set(parse_cores(spec.options["cores"])) for spec in models if "cores" in spec.options]
    return max(1, len(mine.difference(*pinned)) - (len(models) - len(pinned)))


def _drafters(
    settings: ServeSettings, specs: list[DrafterSpec], verifier: str, uds: Path
) -> list[tuple[str, list[str]]]:
    named: list[tuple[str, list[str]]] = []
    counts: Counter[str] = Counter()
    for spec in specs:
        family = find_family(spec.family).name
        counts[family] += 1
        name = spec.options.get("id") or f"{family}-{counts[family]}"
        options = {"family": spec.family, "verifier": verifier, "uds": str(uds), "id": name}
        if spec.runs_model:
            options["dtype"] = settings.dtype
            # A model that is told its cores has a thread for each.
            told = "cores" in spec.options or spec.options.get("placement") == "grace"
            options |= {} if told else {"threads": "1"}
        if settings.redis is not None and spec.shares_redis:
            options |= {
                name: str(value)
                for name in _REDIS
                if (value := getattr(settings, name)) is not None
            }
        options |= spec.options
        _check(spec, options)
        named.append((name, [word for key, value in options.items() for word in _flag(key, value)]))
    return named


def _check(spec: DrafterSpec, options: dict[str, str]) -> None:
    """Raises OutriderError(INVALID_VALUE) for what the drafter's process would refuse, or would not use."""
    known = sorted(set(spec.schema.model_fields) - {"config", "family"})
    for name in spec.options:
        if name not in known:
            own = ", ".join(name for name in known if name not in ScrapedSettings.model_fields)
            problem = f"{spec.family} has no setting {name}{suggestion(name, known)}; it has {own}"
            raise OutriderError(Reason.INVALID_VALUE, problem, "drafter")
    try:
        drafter = load(spec.schema, options)
    except ValueError as error:
        raise invalid("drafter", f"{spec.family}: {'; '.join(str(error).splitlines())}") from error
    if (
        spec.shares_redis
        and getattr(drafter, "redis", None)
        and not getattr(drafter, "pool_secret_file", None)
    ):
        raise invalid(
            "redis",
            "needs --pool-secret-file FILE, with the secret that keys in Redis are made with",
        )


def _flag(key: str, value: str) -> list[str]:
    name = key.replace("_", "-")
    if value.lower() in ("true", "false"):
        return [f"--{name}" if value.lower() == "true" else f"--no-{name}"]
    return [f"--{name}", value]


def _gateway_arguments(
    settings: ServeSettings, verifier: str, http_port: int, grpc_port: int
) -> list[str]:
    arguments = ["--verifier", verifier, "--tokenizer", settings.target]
    arguments += ["--http-host", settings.host, "--http-port", str(http_port)]
    arguments += [word for name in settings.allowed_hosts for word in ("--allowed-hosts", name)]
    arguments += [
        word for origin in settings.allowed_origins for word in ("--allowed-origins", origin)
    ]
    return [*arguments, "--grpc-listen", f"{settings.host}:{grpc_port}"]


def free_port(host: str) -> int:
    """A port that nothing listens on now."""
    return _port("port", host, 0)


def _port(field: str, host: str, wanted: int) -> int:
    """The port, or a free one for 0."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as cause:
            raise OutriderError(
                Reason.INVALID_VALUE,
                f"{field} {wanted} on {host} cannot be used: {cause.strerror}",
                field,
            ) from cause
        port: int = probe.getsockname()[1]
        return port
