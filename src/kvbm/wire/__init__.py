"""Wires send bytes and notes from one process to another.  A wire opens no sockets itself; NIXL and torch.distributed do.

`Wire` defines the calls and guarantees of every wire.  A transport is imported on first access, and needs its package only then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .protocol import NOTE_BYTES, Op, Slab, Slice, Wire

if TYPE_CHECKING:
    from ._faulty import Fault, Faulty, faulty, random_faults
    from ._mapped import Mapped, mapped
    from ._memory import Hub, memory
    from ._nixl import nixl
    from ._nixl_storage import nixl_files, nixl_objects
    from ._torch import torch

__all__ = [
    "NOTE_BYTES", "Fault", "Faulty", "Hub", "Mapped", "Op", "Slab", "Slice", "Wire", "faulty", "mapped", "memory",
    "nixl", "nixl_files", "nixl_objects", "random_faults", "torch",
]  # fmt: skip

#: Name → module.  No module may have the name of a transport: importing it would hide the function.
_HOME = {
    **dict.fromkeys(("Fault", "Faulty", "faulty", "random_faults"), "_faulty"),
    **dict.fromkeys(("Hub", "memory"), "_memory"),
    **dict.fromkeys(("Mapped", "mapped"), "_mapped"),
    **dict.fromkeys(("nixl_files", "nixl_objects"), "_nixl_storage"),
    "nixl": "_nixl",
    "torch": "_torch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
