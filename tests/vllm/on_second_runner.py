"""A verifier that computes with vLLM's second runner, as `verifier_svc` does on a GPU.

Triton's interpreter runs the runner's kernels, so a step takes up to half a second.
"""

from __future__ import annotations

import sys

from tests.vllm.write_texts import choose_runner


def main() -> None:
    """Choose the runner before vLLM is imported, and run the verifier."""
    choose_runner(v2=True)
    from outrider.process.settings.config import parse
    from verifier_svc.__main__ import run
    from verifier_svc.config import VerifierSettings

    run(parse(VerifierSettings, "verifier", sys.argv[1:]))


if __name__ == "__main__":
    main()
