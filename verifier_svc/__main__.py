"""`python -m verifier_svc`: runs a verifier without drafters in its process."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.errors import OutriderError
from outrider.process.settings.config import need_models, parse
from verifier_svc.check import check
from verifier_svc.config import VerifierSettings

if TYPE_CHECKING:
    from verifier_svc.metrics import VerifierMetrics

_Settings = TypeVar("_Settings", bound=VerifierSettings)
_SERVICE_NAME = "outrider-verifier"


async def _serve(settings: VerifierSettings, metrics: VerifierMetrics) -> None:
    from verifier_svc.server import serve

    await serve(settings, metrics)


def run(
    settings: _Settings,
    serve: Callable[[_Settings, VerifierMetrics], Coroutine[Any, Any, None]] = _serve,
    check: Callable[[_Settings], None] = check,
) -> None:
    """Run the verifier; with `--check-config`, only `check` the settings.

    If libraries are missing, or `serve` raises OutriderError, exit with status 1 and an error
    sentence.
    """
    # This import is not at the top, so that `--help` answers at once.
    import uvloop

    from outrider.process.observability import telemetry
    from outrider.process.settings.check_config import check_config
    from verifier_svc.metrics import VerifierMetrics

    if settings.check_config:
        check_config(settings, "verifier", lambda: check(settings))
        return
    telemetry.setup_logging(settings.log_level, settings.log_format)
    port = settings.listen.rpartition(":")[2]
    telemetry.setup(_SERVICE_NAME, instance=f"{platform.node()}:{port}")
    # The engine's thread and the event loop share the interpreter. At Python's default
    # switch interval of 5 ms the loop could delay the engine by a whole step.
    sys.setswitchinterval(0.0005)
    metrics = VerifierMetrics(settings.served_names[0])
    try:
        need_models()
        uvloop.run(serve(settings, metrics))
    except OutriderError as error:
        raise SystemExit(f"verifier: {error}") from error
    telemetry.send_spans_and_exit()


if __name__ == "__main__":
    run(parse(VerifierSettings, "verifier", sys.argv[1:]))
