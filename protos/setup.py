"""Builds the wheel of outrider-protos from the protos and the code generated from them.

The code stays in `outrider/v1` beside this folder, so that there is one copy of it. In the wheel it
is in a folder of its own, which a .pth file adds to the end of Python's path. So `import
outrider.v1` works without Outrider. Where both packages are installed, Outrider's own `outrider.v1`
comes first, and no file belongs to both packages.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

_SOURCES = Path("..")
_FOLDER = "outrider_protos"
_PACKAGE = f"{_FOLDER}.outrider.v1"


class _Build(build_py):
    """Adds the protos, the mark of a typed package, and the .pth file."""

    def run(self) -> None:
        super().run()
        package = Path(self.build_lib, *_PACKAGE.split("."))
        for proto in Path("outrider/v1").glob("*.proto"):
            shutil.copyfile(proto, package / proto.name)
        (package / "py.typed").touch()
        Path(self.build_lib, f"{_FOLDER}.pth").write_text(f"{_FOLDER}\n")


def _version() -> str:
    found = re.search(
        r'^__version__ = "(.+)"$', (_SOURCES / "outrider/__init__.py").read_text(), re.MULTILINE
    )
    if found is None:
        raise SystemExit("outrider/__init__.py has no __version__")
    return found[1]


# A package's licence must be beside its pyproject.toml.
shutil.copyfile(_SOURCES / "LICENSE", "LICENSE")
setup(
    version=_version(),
    packages=[_PACKAGE],
    package_dir={_PACKAGE: str(_SOURCES / "outrider/v1")},
    package_data={_PACKAGE: ["*.pyi"]},
    cmdclass={"build_py": _Build},
)
