"""SGLang: pages in host memory of a declared layout, by a cache linker, and pages in files, by a HiCache storage backend.

``docs/sglang.md`` has the commands.  SGLang is imported with the first of these names that is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..versions import require_version

__all__ = ["KvbmLinker", "KvbmStorage"]

#: The first version that is supported, and the first that is not.
VERSIONS = ("0.5.23", "0.5.24")

_HOMES = {"KvbmLinker": "linker", "KvbmStorage": "storage"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang.version import __version__

    require_version("SGLang", __version__, *VERSIONS)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
