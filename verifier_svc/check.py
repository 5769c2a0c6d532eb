"""Checks a verifier's settings for `--check-config`, beyond their types."""

from __future__ import annotations

from pathlib import Path

from outrider.process.security.roles import Role
from outrider.process.settings.check_config import (
    check_address,
    check_certificate,
    check_file,
    check_model,
)
from outrider.process.settings.config import need_models, need_vllm
from verifier_svc.config import VerifierSettings


def check(settings: VerifierSettings) -> None:
    """Raise OutriderError if a setting or a missing library keeps the verifier from starting.

    The error names the setting or the libraries. If nothing is raised, loading the target may still
    fail: only loading shows bad weights or too little memory.
    """
    need_models()
    if settings.engine == "vllm":
        need_vllm()
    check_address("listen", settings.listen)
    check_certificate("tls", settings.tls, Role.VERIFIER)
    check_model("target", settings.target)
    for head in settings.feature_projection:
        check_file("feature-projection", Path(head) / "config.json")
