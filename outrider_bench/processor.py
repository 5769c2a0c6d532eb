"""The name of this machine's processor, for the records of measurements."""

import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    """The model name that Linux gives; without one, the architecture, such as `aarch64`."""
    found = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(), re.MULTILINE)
    if found is None:
        return platform.machine()
    return found.group(1).strip()
