"""Store blocks in safetensors files, with their layout, their shape and a digest of each block.

`save` writes blocks of a pool.  `load` reads them into memory in any layout.  `convert` converts a file to another layout.
With `cast=` they quantise on the way, or the reverse.  Each verifies blocks that have digests: for a block that has changed it
raises `DigestError`, which names file, block, layers and tokens.  `verify` and `digest` check a file without converting it.
`read` and `create` give memory-mapped pools of files.  ``docs/howto/files.md`` describes the format.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .blocks import add_digests, convert, digest, layout_of, load, save, verify
    from .casting import CastFrom
    from .digests import Damage, Digests
    from .file import Stored, create, read

__all__ = [
    "CastFrom", "Damage", "Digests", "Stored", "add_digests", "convert", "create", "digest", "layout_of", "load",
    "read", "save", "verify",
]  # fmt: skip

_HOME = {
    **dict.fromkeys(("add_digests", "convert", "digest", "layout_of", "load", "save", "verify"), "blocks"),
    "CastFrom": "casting",
    **dict.fromkeys(("Damage", "Digests"), "digests"),
    **dict.fromkeys(("Stored", "create", "read"), "file"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
