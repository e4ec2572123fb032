"""A machine with several NUMA nodes, as files below a folder; and the memory policy that this process has for an address."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvbm.memory import numa


def machine(root: Path, nodes: str, gpus: Mapping[str, int | str]) -> Path:
    """Write the nodes with processors and memory (``0-1``), and the node of each GPU by its address on PCI."""
    folder = root / "sys/devices/system/node"
    folder.mkdir(parents=True)
    for name in ("has_cpu", "has_memory"):
        (folder / name).write_text(f"{nodes}\n", encoding="ascii")
    for address, node in gpus.items():
        device = root / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n", encoding="ascii")
    return root


def policy(address: int) -> str:
    """The policy of a mapping's pages: ``default``, ``prefer:0``."""
    found = ""
    for line in Path("/proc/self/numa_maps").read_text(encoding="ascii").splitlines():
        begin, what, *_ = line.split()
        if int(begin, 16) > address:
            break
        found = what
    return found


def require_mbind(address: int, nbytes: int) -> None:
    """Skip the test where the system has no nodes, or forbids mbind, as containers do."""
    if not Path("/proc/self/numa_maps").exists() or (why := numa.bind(address, nbytes, 0)):
        pytest.skip(f"memory cannot be placed here: {why if Path('/proc/self/numa_maps').exists() else 'no numa_maps'}")
