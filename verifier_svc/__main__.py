"""`python -m verifier_svc`: parses the settings and runs the verifier process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from outrider.errors import OutriderError
from outrider.process import telemetry
from outrider.process.check_config import (
    check_address,
    check_certificate,
    check_config,
    check_file,
    check_model,
)
from outrider.process.config import need_models, parse
from verifier_svc.config import VerifierSettings
from verifier_svc.metrics import Metrics

_Settings = TypeVar("_Settings", bound=VerifierSettings)
_SERVICE_NAME = "outrider-verifier"


async def _serve(settings: VerifierSettings, metrics: Metrics) -> None:
    from verifier_svc.server import serve

    await serve(settings, metrics)


def _check(settings: VerifierSettings) -> None:
    """Raise OutriderError that names a setting which the verifier could not start with.

    Weights and the device's memory show only when the target is loaded.
    """
    need_models()
    check_address("listen", settings.listen)
    check_certificate("tls", settings.tls)
    check_model("target", settings.target)
    for head in settings.feature_projection:
        check_file("feature-projection", Path(head) / "config.json")


def main(
    schema: type[_Settings] = VerifierSettings,  # type: ignore[assignment]  # the default's type
    serve: Callable[[_Settings, Metrics], Coroutine[Any, Any, None]] = _serve,
) -> None:
    """Run the verifier; exits with status 1 and one sentence if the target cannot be served.

    `serve` serves with settings of `schema`.
    """
    settings = parse(schema, "verifier", sys.argv[1:])
    if settings.check_config:
        check_config(settings, "verifier", lambda: _check(settings))
        return
    telemetry.setup_logging(settings.log_level, settings.log_format)
    telemetry.setup(_SERVICE_NAME)
    # The engine's thread and the event loop share the interpreter. At the default of 5 ms the loop
    # could delay the engine by a whole step.
    sys.setswitchinterval(0.0005)
    metrics = Metrics(settings.served_name)
    try:
        need_models()
        uvloop.run(serve(settings, metrics))
    except OutriderError as error:
        raise SystemExit(f"verifier: {error}") from error
    telemetry.leave()


if __name__ == "__main__":
    main()
