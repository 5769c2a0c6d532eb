"""`python -m verifier_svc --target MODEL`: holds the target model and decides which draft tokens stand."""

from __future__ import annotations

import logging
import sys

import uvloop

from outrider import telemetry
from outrider.config import parse
from outrider.errors import OutriderError
from outrider.extras import need_models
from verifier_svc.config import VerifierSettings


def main() -> None:
    """Entry point; exits with status 1 and a sentence when the target cannot be served."""
    settings = parse(VerifierSettings, "verifier", sys.argv[1:])
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    telemetry.setup("outrider-verifier", endpoint=settings.otlp_endpoint, sample_ratio=settings.trace_sample_ratio)
    # The engine's thread and the event loop share the interpreter; at the default of 5 ms the loop could hold up a whole step.
    sys.setswitchinterval(0.0005)
    try:
        need_models()
        from verifier_svc.server import serve

        uvloop.run(serve(settings))
    except OutriderError as error:
        raise SystemExit(f"verifier: {error}") from error


if __name__ == "__main__":
    main()
