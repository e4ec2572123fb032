"""Place host memory on the NUMA node of a GPU, before its pages exist.

A copy between a GPU and memory of another node also crosses the link between the processors.  Linux takes a page from the node of
the thread that touches it first, and pinned memory is touched by all cores, so its pages would be on all nodes.  ``mbind`` sets
the node for a range, whichever thread touches it.  It is called through the C library's ``syscall``: libnuma is not needed.

Memory is never refused for its place.  The node is preferred: where it has no free pages, others follow.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
from collections.abc import Iterable
from pathlib import Path

from ..errors import KvbmError, escaping

__all__ = ["bind", "node_of_gpu", "nodes", "place"]

_log = escaping(logging.getLogger(__name__))

#: Numbers of the system calls mbind and get_mempolicy.
_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
_DEFAULT, _PREFERRED = 0, 1  # MPOL_DEFAULT, MPOL_PREFERRED
_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)

#: Refusals that were logged: a program may allocate many pools.
_refused: set[str] = set()


def nodes(root: str | os.PathLike[str] = "/") -> frozenset[int]:
    """The nodes with processors and with memory, by the folder with ``sys``.

    Memory of GPUs that is a node of its own has no processors.
    """
    folder = Path(root) / "sys/devices/system/node"
    return _numbers(folder / "has_cpu") & _numbers(folder / "has_memory")


def _numbers(path: Path) -> frozenset[int]:
    """The numbers of a list such as ``0-1,4``; none if there is no such file."""
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in path.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def node_of_gpu(device: int, root: str | os.PathLike[str] = "/") -> int:
    """The node of a GPU, by its address on PCI; -1 if it is not known, as in many virtual machines."""
    with contextlib.suppress(OSError, ValueError):
        path = Path(root) / "sys/bus/pci/devices" / pci_address(device) / "numa_node"
        return int(path.read_text(encoding="ascii"))
    return -1


def pci_address(device: int) -> str:
    """The name of a GPU in sysfs, such as ``0000:3b:00.0``; empty if cuda.bindings cannot ask this driver."""
    from ..system.machine import cuda

    with contextlib.suppress(ImportError, RuntimeError, KvbmError):
        from cuda.bindings import driver

        cuda(driver.cuInit(0), "starting the driver")
        name: bytes = cuda(driver.cuDeviceGetPCIBusId(64, device), f"asking for the PCI address of cuda:{device}")
        return name.partition(b"\0")[0].decode("ascii").lower()
    return ""


def place(address: int, nbytes: int, device: int | None, root: str | os.PathLike[str] = "/") -> int | None:
    """Let the pages of a range, which begins at a page, come from the node of a GPU.  Call it before they are touched.

    Nothing is done on a machine with one node, if the node of the GPU is not known, and if this thread has a memory policy
    (``numactl``): that stands.  On a machine of several nodes the log says what was done.

    By default the memory is for all GPUs that this process can use; they need to be on one node.  Returns the node; None if the
    range was left as it is.
    """
    known = nodes(root)
    if len(known) < 2:
        return None
    from .. import _core

    gpus = range(_core.device_count()) if device is None else (device,)
    wanted = {node_of_gpu(each, root) for each in gpus}
    whose = "the GPUs" if device is None else f"cuda:{device}"
    if len(wanted) != 1 or not wanted <= known:
        advice = "; device='pinned:N' names the GPU that the memory is for" if device is None and len(wanted) > 1 else ""
        _log.info(
            "kvbm: %d bytes of pinned memory are where they are touched first: %s on nodes %s of %s%s",
            nbytes, whose, sorted(wanted), sorted(known), advice,
        )  # fmt: skip
        return None
    [node] = wanted
    if _has_policy():
        _log.info("kvbm: %d bytes of pinned memory follow this thread's memory policy, %s on node %d", nbytes, whose, node)
        return None
    if why := bind(address, nbytes, node):
        if why not in _refused:
            _refused.add(why)
            _log.warning(
                "kvbm: pinned memory is where it is touched first, and %s on node %d: mbind: %s; a container needs the capability "
                "SYS_NICE for it, or start the process on that node, with numactl", whose, node, why,
            )  # fmt: skip
        return None
    _log.info("kvbm: %d bytes of pinned memory are placed on node %d, that of %s", nbytes, node, whose)
    return node


def bind(address: int, nbytes: int, node: int) -> str:
    """Prefer a node for the pages of a range that do not exist yet; return the system's refusal, or an empty text."""
    words = node // _WORD + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD] = 1 << node % _WORD
    # The kernel reads one bit less than it is told.
    return _call(0, (address, nbytes, _PREFERRED, ctypes.addressof(mask), words * _WORD + 1, 0))


def _has_policy() -> bool:
    mode = ctypes.c_int(_DEFAULT)
    return not _call(1, (ctypes.addressof(mode), 0, 0, 0, 0)) and mode.value != _DEFAULT


def _call(which: int, arguments: Iterable[int]) -> str:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return f"its number on {platform.machine()} is not known"
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    failed = syscall(*map(ctypes.c_long, (numbers[which], *arguments)))
    return os.strerror(ctypes.get_errno()) if failed else ""
