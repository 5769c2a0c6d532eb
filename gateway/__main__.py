"""Serve the OpenAI API and gRPC in front of verifiers.

Run with `outrider gateway --verifier HOST:PORT --tokenizer MODEL`, or `python -m gateway`.
"""

from __future__ import annotations

import platform
import sys

from gateway.config import GatewaySettings
from outrider.errors import OutriderError
from outrider.process.settings.config import parse

_SERVICE_NAME = "outrider-gateway"


def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT. With `check_config`, only check the settings.

    On an error, print one sentence and exit with status 1.
    """
    # This import is not at the top, so that `--help` answers at once.
    import uvloop

    from gateway.check import check
    from gateway.metrics import GatewayMetrics
    from gateway.server import serve
    from outrider.process.observability import telemetry
    from outrider.process.settings.check_config import check_config

    if settings.check_config:
        check_config(settings, "gateway", lambda: check(settings))
        return
    telemetry.setup_logging(settings.log_level, settings.log_format)
    telemetry.setup(_SERVICE_NAME, instance=f"{platform.node()}:{settings.http_port}")
    metrics = GatewayMetrics()
    try:
        uvloop.run(serve(settings, metrics))
    except OutriderError as error:
        print(f"gateway: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    run(parse(GatewaySettings, "gateway", sys.argv[1:]))
