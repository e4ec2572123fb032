"""Wires send bytes and notes from one process to another.  kvbm opens no sockets; NIXL and torch.distributed do.

`Wire` defines the calls and guarantees of every wire.  A transport is imported on first access, and needs its package only then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .protocol import NOTE_BYTES, Op, Slab, Slice, Wire

if TYPE_CHECKING:
    from .agents import nixl
    from .faults import Fault, Faulty, faulty, random_faults
    from .groups import torch
    from .hub import Hub, memory
    from .loans import Mapped, mapped
    from .storage import nixl_files, nixl_objects

__all__ = [
    "NOTE_BYTES",
    "Fault",
    "Faulty",
    "Hub",
    "Mapped",
    "Op",
    "Slab",
    "Slice",
    "Wire",
    "faulty",
    "mapped",
    "memory",
    "nixl",
    "nixl_files",
    "nixl_objects",
    "random_faults",
    "torch",
]

#: Name → module.  No module may have the name of a transport: importing it would hide the function.
_HOME = {
    **dict.fromkeys(("Fault", "Faulty", "faulty", "random_faults"), "faults"),
    **dict.fromkeys(("Hub", "memory"), "hub"),
    **dict.fromkeys(("Mapped", "mapped"), "loans"),
    **dict.fromkeys(("nixl_files", "nixl_objects"), "storage"),
    "nixl": "agents",
    "torch": "groups",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
