"""kvbm converts KV-cache blocks from any layout to any other, at the speed of a memcpy.

Layouts are declared in YAML.  A generator turns them into specialised CUDA kernels.  This module has the conversions.

>>> import kvbm
>>> kvbm.load("universal").order_text
'[b] h l o t d'

NumPy and the compiled part are imported when they are first used.  torch is never imported.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from ._shown import Shown as _Shown
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import kernels
    from .copy.cast_report import CastReport, cast_report
    from .copy.transfer import Transfer, convert
    from .digest.cells import Model
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
    from .layout.layout import Layout
    from .layout.shapes import BlockShape, load_shape, shape_names
    from .layout.spec import layouts, load
    from .matching.declare import declare
    from .matching.match import Match, match
    from .planner.cast import Scale
    from .planner.plan import Plan, plan
    from .pool.pool import Pool
    from .pool.section import PoolSection
    from .reshard.placement import Placement
    from .reshard.sequence import Span


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
    "BlockShape": "layout.shapes",
    "CastReport": "copy.cast_report",
    "Layout": "layout.layout",
    "Match": "matching.match",
    "Model": "digest.cells",
    "Placement": "reshard.placement",
    "PoolSection": "pool.section",
    "Span": "reshard.sequence",
    "Plan": "planner.plan",
    "Scale": "planner.cast",
    "Pool": "pool.pool",
    "Transfer": "copy.transfer",
    "cast_report": "copy.cast_report",
    "convert": "copy.transfer",
    "declare": "matching.declare",
    "layouts": "layout.spec",
    "load": "layout.spec",
    "load_shape": "layout.shapes",
    "match": "matching.match",
    "plan": "planner.plan",
    "shape_names": "layout.shapes",
}  # fmt: skip

__all__ = [
    "BindError", "BlockShape", "BuildError", "CastReport", "CoverageError", "CudaError", "CudaUnavailableError",
    "DTypeError", "DigestError", "KvbmError", "Layout", "LayoutError", "Match", "MissingKernelError", "Model",
    "PeerLostError", "Placement", "Plan", "PlanError", "Pool", "PoolSection", "Scale", "Span", "SpecError", "Transfer",
    "TransferError", "TransferTimeoutError", "cast_report", "convert", "declare", "kernels", "layouts", "load",
    "load_shape", "match", "plan", "shape_names",
]  # fmt: skip

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


#: The pictures of notebooks are imported when the first is asked for.
_Shown.view = staticmethod(lambda: importlib.import_module(".show.notebook", __name__))

if os.environ.get("KVBM_LOG"):
    importlib.import_module(".system.log", __name__).show()
