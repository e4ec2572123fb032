"""LMCache: a device plugin that copies paged blocks with kvbm, and a connector for vLLM whose keys tell models apart.

``docs/engines/lmcache.md`` has the commands.

LMCache finds the classes by entry points.  It uses one of them only if LMCACHE_DEVICE_BACKEND names it: ``kvbm`` (CUDA) or
``kvbm_cpu``.  Otherwise they report that they are not available, so LMCache's default choice of a backend does not change.  LMCache
is imported when one of them is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["KvbmCpuDeviceSpec", "KvbmDeviceSpec", "KvbmLMCacheConnector"]

_HOMES = {"KvbmCpuDeviceSpec": "devices", "KvbmDeviceSpec": "devices", "KvbmLMCacheConnector": "connector"}

#: The first version that was tested, and the first newer one that was not.
VERSIONS = ("0.5.6", "0.5.7")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
