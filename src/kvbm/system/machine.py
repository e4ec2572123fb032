"""The machine on which something is measured: its name and its caches; and calls of the driver."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path
from typing import Any

from ..errors import CudaError

#: Option of Linux's prctl.
_SET_TIMERSLACK = 29


def cuda(result: tuple[Any, ...], what: str) -> Any:
    """The results of a call of cuda.bindings, without its status.

    Parameters
    ----------
    result : tuple
        The status, then the results.
    what : str
        Description of the call for the error message.

    Returns
    -------
    object
        None, the only result, or a tuple of several results.

    Raises
    ------
    CudaError
        The status is not success.
    """
    status, *rest = result
    if int(status):
        raise CudaError(f"{what}: {status.name}", code=int(status), name=status.name)
    return rest[0] if len(rest) == 1 else tuple(rest) if rest else None


def sleep_exactly() -> None:
    """Make short sleeps of this thread precise.  By default Linux adds about 50 µs to each."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)  # nanoseconds


def device_of(place: str) -> int:
    """Ordinal of ``"cuda:N"``; -1 for ``"cpu"``, ``"pinned"`` and ``"pinned:N"``."""
    kind, _, index = place.partition(":")
    return int(index or 0) if kind == "cuda" else -1


def host_beside(place: str) -> str:
    """Where host memory for ``"cpu"`` or a GPU is allocated: ``"cpu"``; ``"pinned:N"`` for ``"cuda:N"``."""
    device = device_of(place)
    return f"pinned:{device}" if device >= 0 else "cpu"


def gpu_and_driver(device: int) -> tuple[str, str]:
    """Name of a GPU and version of its driver.  A table is valid for both.

    Raises
    ------
    CudaUnavailableError
        There is no GPU.
    CudaError
        There is no such GPU.
    """
    from .. import _core

    name = _core.device_info(device)["name"]
    try:
        return name, Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # a container or WSL: the driver reports only its CUDA version
        version = _core.driver_version()
        return name, f"for CUDA {version // 1000}.{version % 1000 // 10}"


def machine(place: str) -> tuple[str, str]:
    """For a GPU: its name and the driver's version.  For a CPU: its name with the number of cores, and an empty text."""
    device = device_of(place)
    if device >= 0:
        return gpu_and_driver(device)
    model = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model} {len(os.sched_getaffinity(0))} cores", ""


def cache_bytes(place: str) -> int:
    """Bytes of the largest cache: a GPU's L2, or a CPU's last level (at least 32 MiB, also if unknown)."""
    device = device_of(place)
    if device >= 0:
        from cuda.bindings import driver

        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        cuda(driver.cuInit(0), "starting the driver")
        return int(cuda(driver.cuDeviceGetAttribute(attribute, device), f"asking for the L2 cache of {place}"))
    sizes = [32 << 20]
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        sizes.append(int(text.rstrip("KMG")) * units.get(text[-1:], 1))
    return max(sizes)
