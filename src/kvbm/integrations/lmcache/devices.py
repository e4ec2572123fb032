"""Device plugins for LMCache: descriptions of devices, with kvbm's operations."""

from __future__ import annotations

import os
from typing import Any

from lmcache._version import __version__
from lmcache.logging import init_logger
from lmcache.v1.platform.devices.cpu import CpuDeviceSpec
from lmcache.v1.platform.devices.cuda import CudaDeviceSpec

from ...errors import escaping
from ...layout.naming import suggestion
from ..versions import require_version
from . import VERSIONS

__all__ = ["KvbmCpuDeviceSpec", "KvbmDeviceSpec"]

logger = escaping(init_logger("lmcache.kvbm"))

_NAMES = ("kvbm", "kvbm_cpu")
_WARNED: set[str] = set()

require_version("LMCache", __version__, *VERSIONS)


def _is_chosen(name: str) -> bool:
    given = os.environ.get("LMCACHE_DEVICE_BACKEND", "").strip().lower()
    if given and given.startswith("kv") and given not in _NAMES and given not in _WARNED:
        _WARNED.add(given)  # LMCache calls this for each of its devices, and then chooses another one without a warning
        logger.warning("LMCACHE_DEVICE_BACKEND: expected kvbm or kvbm_cpu, got %.100r.%s", given, suggestion(given, _NAMES))
    return given == name


class KvbmDeviceSpec(CudaDeviceSpec):  # type: ignore[misc]  # LMCache is not typed
    """CUDA with kvbm's copies."""

    @property
    def backend_name(self) -> str:
        return "kvbm"

    @property
    def ops_cls(self) -> Any:
        from .ops import KvbmCudaOps

        return KvbmCudaOps

    def is_available(self) -> bool:
        return _is_chosen(self.backend_name) and bool(super().is_available())


class KvbmCpuDeviceSpec(CpuDeviceSpec):  # type: ignore[misc]
    """The CPU with kvbm's copies."""

    @property
    def backend_name(self) -> str:
        return "kvbm_cpu"

    @property
    def ops_cls(self) -> Any:
        from .ops import KvbmCpuOps

        return KvbmCpuOps

    def is_available(self) -> bool:
        return _is_chosen(self.backend_name)
