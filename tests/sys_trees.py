"""Makes folders that look like /sys of other machines."""

import re
from pathlib import Path

from outrider.process.settings.cores import format_cores

BOARD = Path(__file__).parent / "placement/gb200"
# The main id register of a Neoverse V2: revision 0 of Grace, and revision 1 of Graviton 4.
_GRACE, _GRAVITON4 = "0x00000000410fd4f0", "0x00000000410fd4f1"


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
    """Return the /sys of the board in the folder `gb200`.

    GPU memory appears as nodes without cores.
    """
    text = (BOARD / "numactl-hardware.txt").read_text()
    listed = re.findall(r"^node (\d+) cpus:(.*)$", text, re.MULTILINE)
    nodes = {int(node): [int(core) for core in cores.split()] for node, cores in listed}
    online = sorted(core for cores in nodes.values() for core in cores)
    midr, vendor = ((BOARD / name).read_text().strip() for name in ("midr_el1", "sys_vendor"))
    written = {node: format_cores(cores) for node, cores in nodes.items()}
    return tree(root, format_cores(online), written, midr, vendor)


def gh200(root: Path, *, boards: int = 1, driver_manages: bool = False) -> Path:
    """Return the /sys of one GH200, or of four in one machine; **reconstructed**, not recorded.

    Each has 72 cores on one node. After all nodes with cores come eight nodes of GPU memory for
    each GH200; MIG may use seven of the eight. There are no nodes of GPU memory where the driver
    manages the GPU's memory itself (CDMM). The nodes of one GH200 are taken from an lscpu in
    https://github.com/bytedance/xpu-perf/issues/129. The number of nodes of four GH200 is taken
    from a `numactl -H` in https://github.com/numactl/numactl/issues/224.
    """
    nodes = {node: f"{72 * node}-{72 * node + 71}" for node in range(boards)}
    if not driver_manages:
        nodes |= dict.fromkeys(range(boards, 9 * boards), "")
    return tree(root, f"0-{72 * boards - 1}", nodes, _GRACE, "NVIDIA")


def graviton4(root: Path, *, sockets: int) -> Path:
    """Return the /sys of an EC2 instance with one or two whole Graviton 4; **reconstructed**.

    It has Grace's core, Neoverse V2: 96 in a socket, and one node for each socket:
    https://github.com/aws/aws-graviton-getting-started/pull/459. EC2's machines name Amazon EC2 as
    their vendor.
    """
    nodes = {node: f"{96 * node}-{96 * node + 95}" for node in range(sockets)}
    return tree(root, f"0-{96 * sockets - 1}", nodes, _GRAVITON4, "Amazon EC2")
