"""Makes the command line of each process of a cell (a combination of settings); starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drafter_svc.config import DrafterSettings, settings_schema
from outrider.errors import OutriderError, invalid
from outrider.process.settings.config import Settings, load
from outrider.process.settings.cores import parse_cores
from outrider_bench.experiment.child import LOOPBACK, Launch
from outrider_bench.experiment.spec import Drafter, Experiment, Setting, Target, drafters_of
from outrider_cli.drafter_spec import DrafterSpec
from outrider_cli.stack_plan import flags
from outrider_cli.verifier import VerifierWithDraftersSettings
from verifier_svc.config import VerifierSettings

DRAFT_MODEL = Path("models/draft")
HEAD = Path("models/heads/eagle3")
_OFFLINE = {"HF_HUB_OFFLINE": "1"}
_LOG_LEVEL: Setting = "warning"
SYNTHETIC = "synthetic"
"""The family of drafters whose acceptance is a setting. They can only be predicted."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The addresses of a verifier's gateway, of its metrics and of its draft stream."""

    name: str
    model: str
    http_port: int
    metrics_port: int
    verifier: str
    """host:port of the draft stream."""
    uds: Path | None = None

    @property
    def url(self) -> str:
        """The gateway's URL."""
        return f"http://{LOOPBACK}:{self.http_port}"


@dataclass(frozen=True, slots=True)
class Dial:
    """The addresses that a drafter dials."""

    verifiers: tuple[str, ...]
    """host:port of each verifier, or of a link to it."""
    uds: Path | None = None


def verifier_launch(
    target: Target, model: Path, endpoint: Endpoint, in_process: Sequence[DrafterSpec] = ()
) -> Launch:
    """Return the command line of a verifier that has the drafters `in_process` in its process.

    Raises OutriderError(INVALID_VALUE) for a wrong setting.
    """
    threads = target.threads
    if threads is None and target.cores:
        threads = len(parse_cores(target.cores, "target.cores"))
    options: dict[str, Setting | list[str] | None] = {
        "target": str(model),
        "model_name": endpoint.model,
        "dtype": target.dtype,
        "listen": endpoint.verifier,
        # Only the experiment's own processes connect, so there is nobody to keep out.
        "open": True,
        "uds": _path(endpoint.uds),
        "threads": threads,
        "metrics_port": endpoint.metrics_port,
        # All measurements of a workload have the same prompts. With a prefix cache, only the first
        # measurement would compute them.
        "prefix_caching": False,
        "log_level": _LOG_LEVEL,
        **target.settings,
    }
    module = "verifier_svc"
    schema: type[VerifierSettings] = VerifierSettings
    if in_process:
        module, schema = "outrider_cli.verifier", VerifierWithDraftersSettings
        options["in_process"] = [*map(str, in_process)]
    _check("target.settings", schema, options)
    return Launch(
        endpoint.name,
        module,
        _flags(options),
        environment=_OFFLINE,
        cores=target.cores,
    )


def gateway_launch(endpoint: Endpoint, model: Path, grpc_port: int) -> Launch:
    """Return the command line of the gateway of one verifier."""
    options: dict[str, Setting | None] = {
        "verifier": endpoint.verifier,
        "tokenizer": str(model),
        "http_host": LOOPBACK,
        "http_port": endpoint.http_port,
        "grpc_listen": f"{LOOPBACK}:{grpc_port}",
        # Only the experiment's own clients connect, so there is nobody to keep out.
        "open": True,
        "log_level": _LOG_LEVEL,
    }
    name = endpoint.name.replace("verifier", "gateway")
    return Launch(name, "gateway", _flags(options), environment=_OFFLINE)


def drafter_launch(field: str, name: str, drafter: Drafter, target: Target, dial: Dial) -> Launch:
    """Return the command line of one process of a drafter; `field` names the drafter in the file.

    Raises OutriderError(INVALID_VALUE) for a wrong setting.
    """
    schema = _schema(field, drafter.family)
    options = _drafter_options(drafter, target, schema, dial)
    options |= {"id": name, "log_level": _LOG_LEVEL, **drafter.settings}
    _check(field, schema, {**options, "verifier": dial.verifiers[0]})
    return Launch(
        name,
        "drafter_svc",
        _flags({"verifier": [*dial.verifiers], **options}),
        environment=_OFFLINE,
    )


def _drafter_options(
    drafter: Drafter, target: Target, schema: type[DrafterSettings], dial: Dial
) -> dict[str, Setting | None]:
    """Return the drafter's fields of the file, keyed by the names of its process's settings."""
    options: dict[str, Setting | None] = {
        "family": drafter.family,
        "uds": _path(dial.uds),
        "threads": drafter.threads,
    }
    if drafter.cores is not None:
        options |= {"cores": drafter.cores, "numa_node": drafter.numa_node}
    if "model" in schema.model_fields:
        options["model"] = str(drafter.model or DRAFT_MODEL)
        options["dtype"] = target.dtype
    if "target" in schema.model_fields:
        options["target"] = str(target.model)
    if "head" in schema.model_fields:
        options["head"] = str(drafter.model or HEAD)
    if "device" in schema.model_fields:
        options["device"] = drafter.device
    return options


def in_process_drafter(field: str, name: str, drafter: Drafter) -> DrafterSpec:
    """Return a drafter in the verifier's process; `field` names it in the file.

    Raises OutriderError(INVALID_VALUE) for a wrong setting, or for a family that cannot run there.
    """
    schema = _schema(field, drafter.family)
    options = {key: str(value) for key, value in drafter.settings.items()}
    for required, bundled in (("model", DRAFT_MODEL), ("head", HEAD)):
        if required in schema.model_fields:
            options[required] = str(drafter.model or bundled)
    spec = DrafterSpec(drafter.family, options).in_verifier(name)
    spec.check_in_process(field)
    return spec


def link_launch(name: str, control: str, forwards: Mapping[str, str]) -> Launch:
    """Return the command line of a link.

    `forwards` has the target of each address on which the link listens.
    """
    pairs = [f"--forward={listen}={target}" for listen, target in forwards.items()]
    arguments = ("--control", control, *pairs)
    return Launch(f"link-{name}", "outrider_bench.experiment.link_process", arguments)


def process_names(name: str, drafter: Drafter) -> list[str]:
    """Return the names of a drafter's processes; a drafter in the verifier's process has none."""
    if drafter.in_process:
        return []
    return [f"{name}-{number + 1}" for number in range(drafter.count)]


def drafter_count(experiment: Experiment) -> int:
    """Return how many drafters the verifier has, including those in its own process."""
    return sum(drafter.count for _, drafter in drafters_of(experiment))


def _schema(field: str, family: str) -> type[DrafterSettings]:
    try:
        return settings_schema(family)
    except OutriderError as error:
        raise invalid(f"{field}.family", error.message) from error


def _check(
    field: str, schema: type[Settings], options: Mapping[str, Setting | list[str] | None]
) -> None:
    given = {
        name: value if isinstance(value, list) else str(value)
        for name, value in options.items()
        if value is not None
    }
    try:
        load(schema, given)
    except ValueError as error:
        raise invalid(field, "; ".join(str(error).splitlines())) from error


def _flags(options: Mapping[str, Setting | list[str] | None]) -> tuple[str, ...]:
    return tuple(flags({name: value for name, value in options.items() if value is not None}))


def _path(path: Path | None) -> str | None:
    if path is None:
        return None
    return str(path)
