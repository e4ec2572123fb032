"""LMCache: a device plugin whose copies of paged blocks are kvbm's; ``docs/lmcache.md`` has the commands.

LMCache finds the classes here by entry points, and takes one of them where LMCACHE_DEVICE_BACKEND names it: ``kvbm`` (CUDA) or
``kvbm_cpu``.  Elsewhere they are never available, so its own choice of a backend stays what it is.  LMCache is imported with the
first of them that is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["KvbmCpuDeviceSpec", "KvbmDeviceSpec"]

#: The first version that is supported, and the first that is not.
VERSIONS = ("0.5.6", "0.5.7")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.devices"), name)
