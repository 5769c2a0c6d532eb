"""The settings of `outrider serve`, and the command line of each process that it runs."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from drafter_svc.config import DrafterSettings, required_setting, settings_schema
from drafter_svc.families.registry import find_family, known_families
from outrider.errors import OutriderError, Reason, invalid
from outrider.launch.supervisor import Child
from outrider.process.config import Dtype, ScrapedSettings, ServiceSettings, load
from outrider.process.cores import parse_cores
from outrider.process.usage import suggestion
from verifier_svc.config import TargetSettings

# Settings of this command that go to drafters that can use a Redis.
_REDIS = ("redis", "redis_password_file", "redis_ca_file", "pool_secret_file")


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """`FAMILY[=VALUE][,key=value...]`, as in `model=PATH,placement=cpu,cores=0,2,4-7`.

    VALUE is the family's required setting. The keys are the drafter's own settings; their values
    may have commas.
    """

    family: str
    options: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> DrafterSpec:
        """Read one `--drafter`; raises OutriderError(INVALID_VALUE) that shows the right form."""
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
            families = f"{', '.join(known_families())} or package.module:Class"
            raise invalid("drafter", f"must be {families}, then key=value, not {text!r}")
        return cls(family, _required(family, value) | options)

    @property
    def schema(self) -> type[DrafterSettings]:
        """The settings of the drafter's process."""
        return settings_schema(self.family)

    @property
    def runs_model(self) -> bool:
        """Whether the drafter runs a model, and so needs cores."""
        return "device" in self.schema.model_fields

    @property
    def shares_redis(self) -> bool:
        """Whether the drafter can share its n-grams through a Redis."""
        return "redis" in self.schema.model_fields


def _required(family: str, value: str) -> dict[str, str]:
    try:
        required = required_setting(settings_schema(family))
    except OutriderError as error:
        raise OutriderError(Reason.INVALID_VALUE, error.message, "drafter") from error
    if required is None:
        if value:
            hint = f"{family} takes no value; its settings follow as key=value after commas"
            raise invalid("drafter", f"{family}={value}: {hint}")
        return {}
    if not value:
        example = f"{family}={required.upper()}"
        raise invalid("drafter", f"{family} needs its {required}, as in {example}")
    return {required: value}


class ServeSettings(TargetSettings, ServiceSettings):
    """Run a verifier, drafters and a gateway on this host until Ctrl-C.

    Each setting may also come from the environment (OUTRIDER_TARGET) or a YAML file (--config).
    TARGET is the same as --target.
    """

    model_config = SettingsConfigDict(env_prefix="OUTRIDER_")

    argument: ClassVar = "target"

    target: str
    """Directory or hub id of the target model."""

    drafter: list[str] = Field(default_factory=list)
    """ngram, suffix, model=PATH, or another family by its name or package.module:Class; its own
    settings follow after commas: model=PATH,placement=cpu,cores=0-3. Repeat it for more
    drafters."""

    dtype: Dtype = "auto"
    """Type of the weights of target and draft models: auto is the checkpoint's."""

    host: str = "127.0.0.1"
    """Address that the gateway listens on."""

    http_port: int = Field(8000, ge=0, le=65535)
    """Port of the OpenAI API; 0 takes a free one."""

    grpc_port: int = Field(8001, ge=0, le=65535)
    """Port of the gateway's gRPC service; 0 takes a free one."""

    allowed_hosts: list[str] = Field(default_factory=list)
    """Names under which clients reach the gateway, such as llm.example.com or *.example.com, beside
    addresses and localhost; * allows all names."""

    allowed_origins: list[str] = Field(default_factory=list)
    """Origins of other websites whose scripts may call the gateway (CORS), such as
    http://localhost:*; * allows all."""

    verifier_host: str = "127.0.0.1"
    """Address that the verifier listens on, for drafters that are started by hand; 0.0.0.0 lets
    other machines in."""

    verifier_port: int = Field(50051, ge=0, le=65535)
    """Port of the verifier; 0 takes a free one."""

    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of the verifier's /metrics on the loopback interface; 0 is off."""

    threads: int | None = Field(None, ge=1)
    """Threads of the target on a CPU; unset leaves a core to each draft model."""

    redis: str | None = None
    """URL of a Redis in which n-gram drafters share each tenant's n-grams, in any form that a
    drafter's `--redis` takes. `--drafter ngram,is_public_pool=true` shares one pool among all
    tenants."""

    redis_password_file: Path | None = None
    """File with the password of the Redis user."""

    redis_ca_file: Path | None = None
    """PEM file with the authorities that may sign the Redis servers' certificates."""

    pool_secret_file: Path | None = None
    """File with the secret from which keys in Redis are made; redis needs it."""

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
    """Plan the processes; the verifier's Unix socket will be in `socket_directory`.

    Raises OutriderError(INVALID_VALUE) that names a port in use or a wrong setting of a drafter.
    """
    http_port = _port("http_port", settings.host, settings.http_port)
    grpc_port = _port("grpc_port", settings.host, settings.grpc_port)
    verifier_port = _port("verifier_port", settings.verifier_host, settings.verifier_port)
    # A verifier that listens on all addresses listens on the loopback interface too.
    verifier_host = settings.verifier_host
    if verifier_host == "0.0.0.0":
        verifier_host = "127.0.0.1"
    verifier = f"{verifier_host}:{verifier_port}"
    uds = socket_directory / "verifier.sock"
    specs = [DrafterSpec.parse(text) for text in settings.drafter]
    listen = f"{settings.verifier_host}:{verifier_port}"
    children = [
        Child("verifier", "verifier_svc", _verifier_arguments(settings, specs, listen, uds)),
        *_drafters(settings, specs, verifier, uds),
        Child("gateway", "gateway", _gateway_arguments(settings, verifier, http_port, grpc_port)),
    ]
    for child in children:
        child.arguments += _service_arguments(settings)
    http_url = f"http://{settings.host}:{http_port}"
    return Stack(children, http_url, f"{settings.host}:{grpc_port}", verifier)


def _service_arguments(settings: ServeSettings) -> list[str]:
    """Flags that every process takes."""
    arguments = _flags({"log_level": settings.log_level})
    if settings.otlp_endpoint:
        names = ("otlp_endpoint", "trace_sample_ratio", "otlp_metrics_seconds")
        arguments += _flags({name: getattr(settings, name) for name in names})
    return arguments


def _verifier_arguments(
    settings: ServeSettings, specs: list[DrafterSpec], address: str, uds: Path
) -> list[str]:
    options: dict[str, object] = {
        "target": settings.target,
        "dtype": settings.dtype,
        "threads": settings.threads or _free_cores(specs),
        "listen": address,
        "uds": uds,
        "metrics_port": settings.metrics_port,
    }
    options |= {name: getattr(settings, name) for name in TargetSettings.model_fields}
    return _flags(options)


def _free_cores(specs: list[DrafterSpec]) -> int:
    """Number of cores that draft models leave to the target.

    Processes whose threads meet at barriers on the same cores hold each other up.
    """
    # In a container these can be fewer than the machine has.
    available = os.sched_getaffinity(0)
    models = [spec for spec in specs if spec.runs_model]
    pinned = [set(parse_cores(spec.options["cores"])) for spec in models if "cores" in spec.options]
    return max(1, len(available.difference(*pinned)) - (len(models) - len(pinned)))


def _drafters(
    settings: ServeSettings, specs: list[DrafterSpec], verifier: str, uds: Path
) -> list[Child]:
    children: list[Child] = []
    counts: Counter[str] = Counter()
    for spec in specs:
        family = find_family(spec.family).name
        counts[family] += 1
        name = spec.options.get("id") or f"{family}-{counts[family]}"
        options = {"family": spec.family, "verifier": verifier, "uds": str(uds), "id": name}
        options |= _common_options(settings, spec) | spec.options
        _check(spec, options)
        children.append(Child(name, "drafter_svc", _flags(options)))
    return children


def _common_options(settings: ServeSettings, spec: DrafterSpec) -> dict[str, str]:
    """Settings that a drafter takes over from the command, unless its own options replace them."""
    options: dict[str, str] = {}
    if spec.runs_model:
        options["dtype"] = settings.dtype
        # A model with cores of its own runs one thread on each.
        if "cores" not in spec.options and spec.options.get("placement") != "grace":
            options["threads"] = "1"
    if settings.redis is not None and spec.shares_redis:
        values = {name: getattr(settings, name) for name in _REDIS}
        options |= {name: str(value) for name, value in values.items() if value is not None}
    return options


def _check(spec: DrafterSpec, options: dict[str, str]) -> None:
    """Raises OutriderError(INVALID_VALUE) for options that the drafter's process would refuse."""
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
    has_redis = spec.shares_redis and getattr(drafter, "redis", None)
    if has_redis and not getattr(drafter, "pool_secret_file", None):
        message = "needs --pool-secret-file FILE, with the secret that keys in Redis are made with"
        raise invalid("redis", message)


def _flags(options: Mapping[str, object]) -> list[str]:
    """Settings as command-line words: a list repeats its flag, a bool is --name or --no-name."""
    words: list[str] = []
    for key, value in options.items():
        name = key.replace("_", "-")
        for item in value if isinstance(value, list) else [value]:
            text = str(item)
            if text.lower() == "true":
                words.append(f"--{name}")
            elif text.lower() == "false":
                words.append(f"--no-{name}")
            else:
                words += [f"--{name}", text]
    return words


def _gateway_arguments(
    settings: ServeSettings, verifier: str, http_port: int, grpc_port: int
) -> list[str]:
    return _flags(
        {
            "verifier": verifier,
            "tokenizer": settings.target,
            "http_host": settings.host,
            "http_port": http_port,
            "allowed_hosts": settings.allowed_hosts,
            "allowed_origins": settings.allowed_origins,
            "grpc_listen": f"{settings.host}:{grpc_port}",
        }
    )


def free_port(host: str) -> int:
    """A port that nothing listens on now."""
    return _port("port", host, 0)


def _port(field: str, host: str, wanted: int) -> int:
    """The port, or a free one for 0; raises OutriderError(INVALID_VALUE) if it is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as cause:
            message = f"{field} {wanted} on {host} cannot be used: {cause.strerror}"
            raise OutriderError(Reason.INVALID_VALUE, message, field) from cause
        port: int = probe.getsockname()[1]
        return port
