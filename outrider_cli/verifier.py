"""`outrider verifier`: a verifier, with the drafters in its process that its settings name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator

from drafter_svc.check import check_int8
from outrider.errors import OutriderError
from outrider.process.settings.check_config import check_file, check_model
from outrider.process.settings.config import parse
from outrider_cli.drafter_spec import DrafterSpec
from verifier_svc import __main__ as verifier
from verifier_svc.check import check
from verifier_svc.config import VerifierSettings

if TYPE_CHECKING:
    from verifier_svc.metrics import VerifierMetrics


class VerifierWithDraftersSettings(VerifierSettings):
    """Hold the target model, and accept the draft tokens that it agrees with.

    Each setting may also come from the environment (OUTRIDER_VERIFIER_TARGET) or a YAML file
    (--config).
    """

    groups: ClassVar[Mapping[str, str]] = {"in_process": "Drafts"}

    in_process: list[str] = Field(default=[])
    """A drafter in the verifier's process, on the target's device: model=PATH, head=PATH, or
    another family that runs a model. The family's other settings follow after commas, as in
    head=PATH,head-states=2,16,29. Repeat it for more drafters."""

    @field_validator("in_process")
    @classmethod
    def _check_drafters(cls, texts: list[str]) -> list[str]:
        for text in texts:
            try:
                DrafterSpec.parse(text, "in_process").check_in_process("in_process")
            except OutriderError as error:
                raise ValueError(error.message.removeprefix("in_process ")) from error
        return texts

    @property
    def in_process_drafters(self) -> list[DrafterSpec]:
        """The drafters in the verifier's process."""
        return [DrafterSpec.parse(text) for text in self.in_process]


def check_with_drafters(settings: VerifierWithDraftersSettings) -> None:
    """Do the checks of `verifier_svc.check.check`, also for the drafters in the process."""
    from outrider_cli.in_process_drafters import in_process_settings

    check(settings)
    for spec in settings.in_process_drafters:
        if model := spec.options.get("model"):
            check_model("in-process", model)
        if head := spec.options.get("head"):
            check_file("in-process", Path(head) / "config.json")
        check_int8(in_process_settings(spec, settings))


async def _serve(settings: VerifierWithDraftersSettings, metrics: VerifierMetrics) -> None:
    """Load the drafters, if any, then serve as `verifier_svc.server.serve` does."""
    from verifier_svc.server import serve

    drafters = []
    if settings.in_process:
        from outrider_cli.in_process_drafters import load_drafters

        drafters = await load_drafters(settings.in_process_drafters, settings, metrics)
    await serve(settings, metrics, drafters)


def run(settings: VerifierWithDraftersSettings) -> None:
    """Run the verifier; exits with status 1 and one sentence if the target cannot be served."""
    verifier.run(settings, _serve, check_with_drafters)


if __name__ == "__main__":
    run(parse(VerifierWithDraftersSettings, "verifier", sys.argv[1:]))
