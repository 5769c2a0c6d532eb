"""The command line of each process that `outrider serve` runs."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from drafter_svc.families.registry import find_family
from drafter_svc.placement import GRACE
from outrider.errors import OutriderError, Reason, invalid
from outrider.process.network.ports import check_port, free_port, refused
from outrider.process.security.roles import Role
from outrider.process.settings.config import ScrapedSettings, load
from outrider.process.settings.cores import parse_cores
from outrider.process.settings.usage import suggestion
from outrider_cli.drafter_spec import DrafterSpec
from outrider_cli.serve_settings import ServeSettings
from outrider_cli.supervisor import Child
from verifier_svc.config import TargetSettings

# How long an answer that has started waits for the verifier, which may have died and be loading the
# target again (seconds).
_RELOAD_S = 300


@dataclass(frozen=True, slots=True)
class Stack:
    """The child processes in the order to start them, and the addresses where they listen."""

    children: list[Child]
    http_url: str
    grpc_address: str
    verifier_address: str
    ca: Path | None = None
    """File with the authority of the gateway's certificate; None without TLS."""


def plan_stack(settings: ServeSettings, socket_directory: Path) -> Stack:
    """Plan the processes; the verifier's Unix socket will be in `socket_directory`.

    Raises OutriderError(INVALID_VALUE) that names a port in use or a wrong setting of a drafter.
    """
    http_port = _port("http-port", settings.host, settings.http_port)
    grpc_port = _port("grpc-port", settings.host, settings.grpc_port)
    verifier_port = _port("verifier-port", settings.verifier_host, settings.verifier_port)
    verifier = f"{_dialled(settings.verifier_host)}:{verifier_port}"
    uds = socket_directory / "verifier.sock"
    named = _named(settings)
    in_process = {name: spec for name, spec in named.items() if _is_in_process(settings, spec)}
    others = {name: spec for name, spec in named.items() if name not in in_process}
    listen = f"{settings.verifier_host}:{verifier_port}"
    children = [
        _verifier(settings, in_process, others, listen, uds),
        *_drafters(settings, others, verifier, uds),
        Child("gateway", "gateway", _gateway_arguments(settings, verifier, http_port, grpc_port)),
    ]
    for child in children:
        child.arguments += _service_arguments(settings)
    host = _dialled(settings.host)
    scheme = "http" if settings.certs is None else "https"
    ca = settings.files(Role.GATEWAY.value).get("tls_ca")
    http_url = f"{scheme}://{host}:{http_port}"
    return Stack(children, http_url, f"{host}:{grpc_port}", verifier, ca)


def _dialled(host: str) -> str:
    """Return the address at which this host's processes dial a server that listens on `host`.

    A server that listens on all addresses also listens on the loopback interface, which a
    certificate can name.
    """
    return "127.0.0.1" if host == "0.0.0.0" else host


def _service_arguments(settings: ServeSettings) -> list[str]:
    """Return the flags that every process takes."""
    return flags({"log_level": settings.log_level, "log_format": settings.log_format})


def _named(settings: ServeSettings) -> dict[str, DrafterSpec]:
    """Return the drafters, keyed by id.

    Raises OutriderError(INVALID_VALUE) if two have the same id.
    """
    found: dict[str, DrafterSpec] = {}
    counts: Counter[str] = Counter()
    for spec in map(DrafterSpec.parse, settings.drafter):
        family = find_family(spec.family).name
        counts[family] += 1
        name = spec.options.get("id") or f"{family}-{counts[family]}"
        if name in found:
            raise invalid("drafter", f"names two drafters {name!r}")
        found[name] = spec
    return found


def _is_in_process(settings: ServeSettings, spec: DrafterSpec) -> bool:
    """Return whether a drafter runs in the verifier's process.

    Two processes would use one GPU in turns, and the states that a head reads would be copied. On a
    CPU, a draft model in a separate process has its own core and interpreter.
    """
    if spec.place is not None:
        return spec.place == "in-process"
    if not spec.runs_model:
        return False
    if spec.options.keys() - spec.in_process_schema.model_fields.keys():
        # The drafter has settings that need a separate process, such as its cores.
        return False
    device = spec.options.get("device", "auto")
    if device != "auto" and gpu_of(device) != gpu_of(settings.device):
        return False
    # vLLM takes the GPU's memory for itself. A head is small enough to fit beside it.
    has_room = settings.engine == "native" and gpu_of(settings.device) is not None
    return spec.reads_states or has_room


def gpu_of(device: str) -> int | None:
    """Return the number of the GPU that the setting `device` means; None for a CPU."""
    kind, _, number = device.partition(":")
    if kind == "cpu" or (kind == "auto" and not _has_gpu()):
        return None
    return int(number or 0)


@cache
def _has_gpu() -> bool:
    """Return whether torch finds a GPU.

    Torch takes seconds to load, so it is asked only if the GPU's driver is installed.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


def _verifier(
    settings: ServeSettings,
    in_process: Mapping[str, DrafterSpec],
    others: Mapping[str, DrafterSpec],
    address: str,
    uds: Path,
) -> Child:
    options: dict[str, object] = {
        "target": settings.target,
        "dtype": settings.dtype,
        "threads": settings.threads or _free_cores([*others.values()]),
        "listen": address,
        "uds": uds,
    }
    options |= {name: getattr(settings, name) for name in TargetSettings.model_fields}
    options |= settings.files(Role.VERIFIER.value)
    if not in_process:
        return Child("verifier", "verifier_svc", flags(options))
    specs = [spec.in_verifier(name) for name, spec in in_process.items()]
    for spec in specs:
        spec.check_in_process("drafter")
    options["in_process"] = [*map(str, specs)]
    return Child("verifier", "outrider_cli.verifier", flags(options))


def _free_cores(specs: list[DrafterSpec]) -> int:
    """Return the number of cores that draft models leave to the target.

    Processes whose threads meet at barriers on the same cores delay each other.
    """
    # A container can have fewer cores than the machine.
    available = os.sched_getaffinity(0)
    models = [spec for spec in specs if spec.runs_model]
    given = [spec.options["cores"] for spec in models if "cores" in spec.options]
    pinned = [set(parse_cores(cores)) for cores in given if cores != GRACE]
    return max(1, len(available.difference(*pinned)) - (len(models) - len(pinned)))


def _drafters(
    settings: ServeSettings, specs: Mapping[str, DrafterSpec], verifier: str, uds: Path
) -> list[Child]:
    children: list[Child] = []
    for name, spec in specs.items():
        options = {"family": spec.family, "verifier": verifier, "uds": str(uds), "id": name}
        options |= _common_options(settings, spec) | spec.options
        _check(spec, options)
        children.append(Child(name, "drafter_svc", flags(options)))
    return children


def _common_options(settings: ServeSettings, spec: DrafterSpec) -> dict[str, str]:
    """Return the settings that the command gives a drafter; the drafter's options replace them."""
    files = settings.files(settings.drafter_role)
    options = {name: str(path) for name, path in files.items()}
    if "target" in spec.schema.model_fields:
        options["target"] = settings.target
    if spec.runs_model:
        options["dtype"] = settings.dtype
        # A model with its own cores runs one thread on each core, any other model only one thread.
        if "cores" not in spec.options:
            options["threads"] = "1"
    return options


def _check(spec: DrafterSpec, options: dict[str, str]) -> None:
    """Raise OutriderError(INVALID_VALUE) for options that the drafter's process would refuse."""
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


def flags(options: Mapping[str, object]) -> list[str]:
    """Return settings as flags: a list repeats its flag, a bool is --name or --no-name."""
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
    files: dict[str, Path] = settings.files(Role.GATEWAY.value)
    public = {f"public_{name}": path for name, path in files.items() if name != "tls_ca"}
    patience = {"resume_seconds": _RELOAD_S}
    if os.environ.get("OUTRIDER_GATEWAY_RESUME_SECONDS"):
        patience = {}
    return flags(
        {
            "verifier": verifier,
            "tokenizer": settings.target,
            "http_host": settings.host,
            "http_port": http_port,
            "keys_file": [] if settings.keys_file is None else [settings.keys_file],
            "open": settings.open,
            "tool_format": settings.tool_format,
            "grpc_listen": f"{settings.host}:{grpc_port}",
        }
        | files
        | public
        | patience
    )


def _port(flag: str, host: str, wanted: int) -> int:
    """Return the port, or a free port for 0.

    Raises OutriderError(INVALID_VALUE) if the port is in use.
    """
    try:
        if wanted == 0:
            return free_port(host)
        check_port(host, wanted)
    except OSError as cause:
        raise refused(flag, host, wanted, cause) from cause
    return wanted
