"""Resharding: planned and proven copies between engines that distribute a cache differently over their ranks.

`plan` and `gather` are pure Python.  Names that need NumPy and the compiled part are imported on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .messages import Message, Resharding, gather, plan
from .placement import Placement
from .presets import dynamo, load, sglang, trtllm, vllm
from .proof import prove

if TYPE_CHECKING:
    from ..link.chunk import Chunk, Trailer, chunks
    from ..link.chunks import ChunksDone, Cut
    from .local import Local, LocalDone
    from .packer import Packer
    from .sequence import Pairs, Rank, Span, pair_up

__all__ = [
    "Chunk", "ChunksDone", "Cut", "Local", "LocalDone", "Message", "Packer", "Pairs", "Placement", "Rank", "Resharding",
    "Span", "Trailer", "chunks", "dynamo", "gather", "load", "pair_up", "plan", "prove", "sglang", "trtllm", "vllm",
]  # fmt: skip

#: Name → module.
_HOME = {
    **dict.fromkeys(("Arrival", "Gathering", "Sending"), "..link.handle"),
    **dict.fromkeys(("Chunk", "Trailer", "chunks"), "..link.chunk"),
    **dict.fromkeys(("ChunksDone", "Cut"), "..link.chunks"),
    **dict.fromkeys(("Local", "LocalDone"), ".local"),
    **dict.fromkeys(("Pairs", "Rank", "Span", "pair_up"), ".sequence"),
    "Endpoint": "..link.endpoint",
    "Link": "..link.link",
    "Packer": ".packer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name], __name__), name)
