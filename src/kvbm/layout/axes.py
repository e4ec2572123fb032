"""The axes of a cache: their letters in the layout language, their names in texts, and the names of their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: Letter → name.  A layout may declare further axes of its own.
AXES: Mapping[str, str] = MappingProxyType(
    {"b": "block", "l": "layer", "o": "K or V", "h": "KV head", "t": "token", "d": "element of the head"}
)

#: Letter → name of the size: of ``b`` the number of blocks, of the others a field of `BlockShape`.
SIZE_OF: Mapping[str, str] = MappingProxyType({"b": "nb", "l": "nl", "o": "no", "h": "nh", "t": "nt", "d": "hd"})

#: The axes of a block, and their sizes, in the order of the arguments of `BlockShape`.
OF_A_BLOCK = "".join(axis for axis in AXES if axis != "b")
BLOCK_SIZES = tuple(SIZE_OF[axis] for axis in OF_A_BLOCK)
