"""Serve the OpenAI API and gRPC in front of verifiers.

Run with `python -m gateway --verifier HOST:PORT --tokenizer MODEL`.
"""

from __future__ import annotations

import sys

import uvloop

from gateway.access.gate import Gate
from gateway.config import GatewaySettings
from gateway.metrics import Metrics
from gateway.server import serve
from gateway.text.prompts import Prompts
from outrider.errors import OutriderError
from outrider.process import telemetry
from outrider.process.check_config import check_address, check_certificate, check_config
from outrider.process.config import parse

_SERVICE_NAME = "outrider-gateway"


def _check(settings: GatewaySettings) -> None:
    """Raise OutriderError that names a setting which the gateway could not start with."""
    for address in settings.verifier:
        check_address("verifier", address)
    check_address("grpc-listen", settings.grpc_listen)
    check_certificate("tls", settings.tls)
    check_certificate("public-tls", settings.public_tls)
    Prompts(settings.tokenizer, settings.tool_format)
    Gate(settings)


def main(arguments: list[str]) -> None:
    """Read the settings and serve until SIGTERM or SIGINT."""
    settings = parse(GatewaySettings, "gateway", arguments)
    if settings.check_config:
        check_config(settings, "gateway", lambda: _check(settings))
        return
    telemetry.setup_logging(settings.log_level, settings.log_format)
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
