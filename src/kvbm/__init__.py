"""kvbm converts KV-cache blocks from any layout to any other, at the speed of a memcpy.

Layouts are declared in YAML.  A generator turns them into specialised CUDA kernels.  This module has the conversions.

>>> import kvbm
>>> kvbm.load("universal").order_text
'[b] h l o t d'

NumPy and the compiled part are imported when they are first used.  torch is never imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import kernels
    from .digest import Model
    from .errors import (
        BindError,
        BuildError,
        CoverageError,
        CudaError,
        CudaUnavailableError,
        DigestError,
        DTypeError,
        KvbmError,
        LayoutError,
        MissingKernelError,
        PeerLostError,
        PlanError,
        SpecError,
        TransferError,
        TransferTimeoutError,
    )
    from .layout import Layout
    from .matching import Match, match
    from .planner import Plan, plan
    from .pool import Pool
    from .reshard.placement import Placement
    from .reshard.sequence import Span
    from .selection import PoolSection
    from .shapes import BlockShape, load_shape, shape_names
    from .spec import layouts, load
    from .transfer import Transfer, convert

__version__ = "0.1.0"

#: Public name → the module that defines it.
_HOME = {
    **dict.fromkeys(
        (
            "BindError", "BuildError", "CoverageError", "CudaError", "CudaUnavailableError", "DTypeError", "DigestError",
            "KvbmError", "LayoutError", "MissingKernelError", "PeerLostError", "PlanError", "SpecError", "TransferError",
            "TransferTimeoutError",
        ),
        "errors",
    ),
    "BlockShape": "shapes",
    "Layout": "layout",
    "Match": "matching",
    "Model": "digest",
    "Placement": "reshard.placement",
    "PoolSection": "selection",
    "Span": "reshard.sequence",
    "Plan": "planner",
    "Pool": "pool",
    "Transfer": "transfer",
    "convert": "transfer",
    "layouts": "spec",
    "load": "spec",
    "load_shape": "shapes",
    "match": "matching",
    "plan": "planner",
    "shape_names": "shapes",
}  # fmt: skip

__all__ = [
    "BindError",
    "BlockShape",
    "BuildError",
    "CoverageError",
    "CudaError",
    "CudaUnavailableError",
    "DTypeError",
    "DigestError",
    "KvbmError",
    "Layout",
    "LayoutError",
    "Match",
    "MissingKernelError",
    "Model",
    "PeerLostError",
    "Placement",
    "Plan",
    "PlanError",
    "Pool",
    "PoolSection",
    "Span",
    "SpecError",
    "Transfer",
    "TransferError",
    "TransferTimeoutError",
    "convert",
    "kernels",
    "layouts",
    "load",
    "load_shape",
    "match",
    "plan",
    "shape_names",
]

#: Modules that are imported on first access.  The bridges are not in ``__all__``, because each imports its framework.
_MODULES = ("cupy", "jax", "kernels", "numba", "numpy", "reshard", "store", "testing", "torch", "wire")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
