"""Blocks in files: safetensors, with their layout, their shape and a digest of each block beside them.

`save` writes blocks of a pool, `load` reads them into memory in any layout, `convert` makes a file of a file.  What has digests is
verified on the way: a block that is not what it was raises `DigestError`, which names file, block, layers and tokens.  `verify` and
`digest` look at a file alone; `read` and `create` give pools that lie in files.  ``docs/files.md`` is about the format.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .blocks import add_digests, convert, digest, layout_of, load, save, verify
    from .digests import Damage, Digests
    from .file import Stored, create, read

__all__ = [
    "Damage",
    "Digests",
    "Stored",
    "add_digests",
    "convert",
    "create",
    "digest",
    "layout_of",
    "load",
    "read",
    "save",
    "verify",
]

_HOME = {
    **dict.fromkeys(("add_digests", "convert", "digest", "layout_of", "load", "save", "verify"), "blocks"),
    **dict.fromkeys(("Damage", "Digests"), "digests"),
    **dict.fromkeys(("Stored", "create", "read"), "file"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
