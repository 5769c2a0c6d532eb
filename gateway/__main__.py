"""`python -m gateway --verifier HOST:PORT --tokenizer MODEL`: the OpenAI API and gRPC in front of verifiers."""

from __future__ import annotations

import logging
import sys

import uvloop

from gateway.config import GatewaySettings
from gateway.server import serve
from outrider import telemetry
from outrider.config import parse
from outrider.errors import OutriderError


def main(arguments: list[str]) -> None:
    """Read the settings and serve until SIGTERM or SIGINT."""
    settings = parse(GatewaySettings, "gateway", arguments)
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    telemetry.setup("outrider-gateway", endpoint=settings.otlp_endpoint, sample_ratio=settings.trace_sample_ratio)
    try:
        uvloop.run(serve(settings))
    except OutriderError as error:
        print(f"gateway: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
