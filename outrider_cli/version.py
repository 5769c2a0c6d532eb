"""What `outrider --version` prints: the version, its commit, and what this installation has."""

from __future__ import annotations

import pkgutil
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

import outrider
from outrider import __version__

_PACKAGE = Path(outrider.__file__).parent
_NAME = "outrider"
_STEP_MODULE = "outrider.protocol.messages"
"""One of the modules of the engine's step, which are compiled together (setup.py)."""


def described() -> str:
    """Return the lines: version, commit, CPU kernels, the compiled step and installed extras."""
    return "\n".join(
        (
            f"outrider {__version__}",
            f"commit: {commit()}",
            f"CPU kernels: {', '.join(kernels()) or 'none'}",
            f"compiled step: {'yes' if _is_step_compiled() else 'no'}",
            f"extras: {', '.join(extras()) or 'none'}",
        )
    )


def commit() -> str:
    """Return the commit of the build, or else of the running checkout; "unknown" without either.

    The commit ends with "-dirty" if the checkout has changes.
    """
    written = _PACKAGE / "commit.txt"
    if written.is_file():
        return written.read_text().strip()
    sources = _PACKAGE.parent
    if (sources / ".git").exists():
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        try:
            done = subprocess.run(command, cwd=sources, capture_output=True, text=True, check=True)
            return done.stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass
    return "unknown"


def kernels() -> list[str]:
    """Return the kinds of processor for which there are CPU kernels, whether they run here or not.

    The names are those of OUTRIDER_CPU_KERNELS.
    """
    modules = pkgutil.iter_modules([str(_PACKAGE / "lm/cpu")])
    names = (module.name for module in modules if module.name.startswith("_cpu"))
    return sorted(name.removeprefix("_cpu").lstrip("_") or "default" for name in names)


def extras() -> list[str]:
    """Return the extras of which every package is installed, in a version that suits."""
    try:
        package = distribution(_NAME)
    except PackageNotFoundError:
        return []
    requirements = [Requirement(line) for line in package.requires or ()]
    names = package.metadata.get_all("Provides-Extra") or []
    return sorted(name for name in names if _is_installed(name, requirements))


def _is_installed(extra: str, requirements: list[Requirement]) -> bool:
    """True if all requirements of an extra are met; an extra may name other extras."""
    wanted = [each for each in requirements if _belongs_to(each, extra)]
    return all(
        all(_is_installed(inner, requirements) for inner in each.extras)
        if each.name == _NAME
        else _is_met(each)
        for each in wanted
    )


def _belongs_to(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return False
    return marker.evaluate({"extra": extra})


def _is_met(requirement: Requirement) -> bool:
    try:
        found = distribution(requirement.name).version
    except PackageNotFoundError:
        return False
    return requirement.specifier.contains(found, prereleases=True)


def _is_step_compiled() -> bool:
    spec = find_spec(_STEP_MODULE)
    return spec is not None and not (spec.origin or "").endswith(".py")
