"""Folders that look like /sys of other machines."""

import re
from pathlib import Path

from outrider.process.settings.cores import format_cores

BOARD = Path(__file__).parent / "placement/gb200"


def tree(root: Path, online: str, nodes: dict[int, str], midr: str = "", vendor: str = "") -> Path:
    """Make a /sys with the files that placement reads."""
    system = root / "devices/system"
    (system / "cpu").mkdir(parents=True)
    (system / "cpu/online").write_text(online + "\n")
    for node, cores in nodes.items():
        (system / f"node/node{node}").mkdir(parents=True)
        (system / f"node/node{node}/cpulist").write_text(cores + "\n")
    if midr:
        register = system / "cpu/cpu0/regs/identification/midr_el1"
        register.parent.mkdir(parents=True)
        register.write_text(midr + "\n")
    if vendor:
        (root / "class/dmi/id").mkdir(parents=True)
        (root / "class/dmi/id/sys_vendor").write_text(vendor + "\n")
    return root


def gb200(root: Path) -> Path:
    """The /sys of the board in the folder `gb200`; GPU memory appears as nodes without cores."""
    text = (BOARD / "numactl-hardware.txt").read_text()
    listed = re.findall(r"^node (\d+) cpus:(.*)$", text, re.MULTILINE)
    nodes = {int(node): [int(core) for core in cores.split()] for node, cores in listed}
    online = sorted(core for cores in nodes.values() for core in cores)
    midr, vendor = ((BOARD / name).read_text().strip() for name in ("midr_el1", "sys_vendor"))
    written = {node: format_cores(cores) for node, cores in nodes.items()}
    return tree(root, format_cores(online), written, midr, vendor)
