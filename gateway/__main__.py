"""Serve the OpenAI API and gRPC in front of verifiers.

Run with `python -m gateway --verifier HOST:PORT --tokenizer MODEL`.
"""

from __future__ import annotations

import sys

import uvloop

from gateway.config import GatewaySettings
from gateway.metrics import Metrics
from gateway.server import serve
from outrider.errors import OutriderError
from outrider.process import telemetry
from outrider.process.config import parse

_SERVICE_NAME = "outrider-gateway"


def main(arguments: list[str]) -> None:
    """Read the settings and serve until SIGTERM or SIGINT."""
    settings = parse(GatewaySettings, "gateway", arguments)
    telemetry.setup_logging(settings.log_level)
    telemetry.setup(_SERVICE_NAME)
    metrics = Metrics()
    try:
        uvloop.run(serve(settings, metrics))
    except OutriderError as error:
        print(f"gateway: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
