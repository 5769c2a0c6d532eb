"""The entry point: `outrider drafter`, or `python -m drafter_svc`.

The command pins the process to cores if the settings name any, loads the family, and drafts until
SIGTERM or SIGINT.
`outrider drafter erase` deletes a tenant's n-grams and texts from Redis instead.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys

from drafter_svc.config import DrafterSettings, FamilyChoice, settings_schema
from drafter_svc.families.registry import find_family, known_families
from outrider.errors import OutriderError
from outrider.process.settings.config import load, parse
from outrider.process.settings.usage import refuse


def read_settings(arguments: list[str], program: str) -> DrafterSettings:
    """Read the settings from flags, environment and file.

    The family is read first, because it decides which other settings exist. If a setting is wrong,
    print one sentence for each problem and exit with status 2.
    """
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in FamilyChoice.model_fields:
        flags.add_argument(f"--{name}", nargs="?")
    given = {
        name: value
        for name, value in vars(flags.parse_known_args(arguments)[0]).items()
        if value is not None
    }
    schema: type[DrafterSettings] = DrafterSettings
    try:
        family = load(FamilyChoice, given).family
        if family:
            schema = settings_schema(family)
    except (ValueError, OutriderError) as error:
        refuse(program, *str(error).splitlines())
    if not family and "--help" not in arguments:
        choices = ", ".join(known_families())
        refuse(program, f"family: must be given: {choices} or package.module:Class")
    return parse(schema, program, arguments)


def run(settings: DrafterSettings) -> None:
    """Draft until SIGTERM or SIGINT. With `check_config`, only check the settings.

    After an error that a retry cannot cure, print the error and exit with status 1.
    """
    # This import is not at the top, so that `--help` answers at once.
    import uvloop

    from drafter_svc.check import check
    from drafter_svc.metrics import DrafterMetrics
    from drafter_svc.placement import plan
    from drafter_svc.server import SERVICE_NAME, serve
    from outrider.drafter.serve import own_id
    from outrider.process.observability import telemetry
    from outrider.process.settings.check_config import check_config

    if settings.check_config:
        check_config(settings, "drafter", lambda: check(settings))
        return
    family = find_family(settings.family).name
    telemetry.setup_logging(settings.log_level, settings.log_format)
    name = settings.id or f"{family}-{platform.node()}-{os.getpid()}"
    try:
        metrics = DrafterMetrics(own_id(name, settings.tls), family)
        telemetry.setup(SERVICE_NAME, instance=metrics.drafter_id)
        # Apply the placement before torch is imported: torch sizes its thread pools by the cores
        # that it sees, and memory stays on the NUMA node of the core that first touched it.
        place = plan(settings.cores, settings.numa_node, settings.threads)
        place.apply()
        uvloop.run(serve(settings, place, metrics))
    except OutriderError as error:
        raise SystemExit(f"drafter: {error}") from error
    telemetry.send_spans_and_exit()


def main(arguments: list[str], program: str = "drafter") -> None:
    """Run the command; `program` is its name in help and errors."""
    if arguments[:1] == ["erase"]:
        from drafter_svc.erase import main as erase

        erase(arguments[1:], f"{program} erase")
        return
    run(read_settings(arguments, program))


if __name__ == "__main__":
    main(sys.argv[1:])
