"""`outrider lab profile`."""

from __future__ import annotations

from outrider.process.settings.config import parse
from outrider_bench.commands.entry import refusing
from outrider_bench.settings import ProfileSettings

_PROGRAM = "outrider lab profile"


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    settings = parse(ProfileSettings, _PROGRAM, arguments)
    from outrider_bench.experiment.profile import measure

    with refusing(_PROGRAM):
        profile = measure(settings)
    profile.save(settings.out)
    print(f"written: {settings.out}")
    return 0
