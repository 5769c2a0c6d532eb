"""`outrider verifier`: a verifier, with a head in its own process where its settings name one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from outrider.process.settings.config import parse
from verifier_svc import __main__ as verifier
from verifier_svc.config import VerifierSettings

if TYPE_CHECKING:
    from verifier_svc.metrics import VerifierMetrics


class HeadVerifierSettings(VerifierSettings):
    """Hold the target model, and accept the draft tokens that it agrees with.

    Each setting may also come from the environment (OUTRIDER_VERIFIER_TARGET) or a YAML file
    (--config).
    """

    groups: ClassVar[Mapping[str, str]] = {"head": "Heads"}

    head: str | None = Field(None, min_length=1)
    """Directory of a head that drafts in the verifier's process, on the target's device."""

    head_states: list[int] = Field(default=[])
    """The hidden states that the head reads, numbered as for `feature_states`, if its file is wrong
    about them. By default, where the file may mean several layers, the head reads those with which
    it guesses a text best."""


async def _serve(settings: HeadVerifierSettings, metrics: VerifierMetrics) -> None:
    """Load the head, if any, then serve as `verifier_svc.server.serve` does."""
    from verifier_svc.server import serve

    own = None
    if settings.head is not None:
        from outrider_cli.own_head import load_head

        own = await load_head(settings.head, settings.head_states, settings, metrics)
    await serve(settings, metrics, own)


def run(settings: HeadVerifierSettings) -> None:
    """Run the verifier; exits with status 1 and one sentence if the target cannot be served."""
    verifier.run(settings, _serve)


if __name__ == "__main__":
    run(parse(HeadVerifierSettings, "verifier", sys.argv[1:]))
