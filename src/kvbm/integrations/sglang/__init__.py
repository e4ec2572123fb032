"""SGLang: a cache linker for pages in host memory, and a HiCache storage backend for pages in files, in declared layouts.

``docs/engines/sglang.md`` has the commands.  SGLang is imported when one of these names is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..versions import require_version

__all__ = ["KvbmLinker", "KvbmStorage"]

#: The first version that was tested, and the first newer one that was not.
VERSIONS = ("0.5.23", "0.5.24")

_HOMES = {"KvbmLinker": "linker", "KvbmStorage": "storage"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang.version import __version__

    require_version("SGLang", __version__, *VERSIONS)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
