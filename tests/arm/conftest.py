"""The wheel for ARM, cross-built from this tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.arm import arm


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel's file."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run([str(arm.HERE / "build-wheel.sh"), str(folder)], env=environment, check=True)
    [found] = folder.iterdir()
    return found


@pytest.fixture(scope="session")
def packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder from which ARM's Python imports the wheel's packages."""
    folder = tmp_path_factory.mktemp("packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
