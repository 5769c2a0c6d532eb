"""Checks a gateway's settings for `--check-config`, beyond their types."""

from __future__ import annotations

from gateway.access.gate import Gate
from gateway.config import GatewaySettings
from gateway.text.prompts import Prompts
from outrider.process.security.roles import Role
from outrider.process.settings.check_config import check_address, check_certificate


def check(settings: GatewaySettings) -> None:
    """Raise OutriderError if a setting keeps the gateway from starting. The error names it."""
    for address in settings.verifier:
        check_address("verifier", address)
    check_address("grpc-listen", settings.grpc_listen)
    check_certificate("tls", settings.tls, Role.GATEWAY)
    check_certificate("public-tls", settings.public_tls)
    Prompts(settings.tokenizer, settings.tool_format)
    Gate(settings)
