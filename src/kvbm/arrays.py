"""Lists of arrays in, lists of arrays out: what the bridges to NumPy, CuPy, Numba and JAX have in common.

A bridge is one file that says how its framework's arrays are looked at and made; everything else stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .contract import (
    Caller,
    Kind,
    Seen,
    Side,
    block_shape,
    layout_name,
    named,
    require,
    require_copy,
    require_device,
    require_writable,
    shape_text,
    side_of,
)
from .errors import BindError, KvbmError
from .pool import Array, Pool, describe
from .transfer import convert as convert_pools

__all__ = ["Bridge", "convert", "convert_"]


class Bridge(NamedTuple):
    """How a framework's arrays are looked at and made.

    Attributes
    ----------
    name : str
        What errors call the framework.
    expected : str
        The type that is taken.
    takes : callable
        Whether an object is one of its arrays.
    contiguous : str
        How it makes an array contiguous.
    empty : callable
        ``(kind, like)``: an array of a kind, not initialised, of its dtype or else of that of another, on whose device it is.
    look : callable
        As `kvbm.pool.describe`.
    """

    name: str
    expected: str
    takes: Callable[[Any], bool]
    contiguous: str
    empty: Callable[[Kind, Any], Any]
    look: Callable[[Any, str], Array] = describe

    def caller(self, operator: str, argument: str) -> Caller:
        return Caller(f"{self.name}.{operator}", argument, self.contiguous)


class _List(NamedTuple):
    """Arrays as they were given, and as they are seen."""

    who: Caller
    arrays: list[Any]
    seen: list[Seen]

    @classmethod
    def of(cls, bridge: Bridge, who: Caller, arrays: Any) -> _List:
        given = list(arrays) if isinstance(arrays, list | tuple) else [arrays]
        seen = []
        for index, array in enumerate(given):
            if not bridge.takes(array):
                kind = type(array)
                raise BindError(
                    f"{who(index)} is a {kind.__module__.partition('.')[0]}.{kind.__name__}; expected {bridge.expected}"
                )
            seen.append(Seen(*bridge.look(array, who(index))))
        return cls(who, given, seen)

    def blocks(self, side: Side) -> int:
        return int(side.blocks(self.who, [one.shape for one in self.seen]))

    def pool(self, side: Side, blocks: int, device: str) -> Pool | None:
        """A pool of them, once they have passed all gates; None for no blocks."""
        if self.seen:
            require_device(self.who(0), self.seen[0].device, "input #0", device)
        require(self.who, self.seen, side.sized(blocks))
        if not blocks:
            return None
        # Memory of one width is memory of the dtype that is wanted: the gates have seen to that.
        sized = side.sized(blocks)
        found = [Array(*one[:3], sized.dtype(index), one.device, one.readonly) for index, one in enumerate(self.seen)]
        return Pool.trusted(side.layout, side.shape, found, self.arrays)


def convert(bridge: Bridge, arrays: Any, src: Any, dst: Any, shape: Any, stream: Any = None) -> list[Any]:
    """Convert blocks into new arrays."""
    who = bridge.caller("convert", "input")
    try:
        source = _List.of(bridge, who, arrays)
        sides = _sides(who.operator, src, dst, shape, source)
        blocks = source.blocks(sides[0])
        if not source.arrays:
            if sides[1].arrays_a_block:
                return []
            raise BindError(f"inputs: expected at least one array, which tells the dtype and the device of {sides[1]}")
        pool = source.pool(sides[0], blocks, source.seen[0].device)
        sized = sides[1].sized(blocks)
        out = [bridge.empty(sized.kind(index), source.arrays[0]) for index in range(sized.arrays)]
        if pool is None:
            return out
        target = _List.of(bridge, bridge.caller("convert", "output"), out)
        into = target.pool(sides[1], blocks, source.seen[0].device)
        assert into is not None
        convert_pools(pool, into, stream=stream)
        return out
    except KvbmError as error:
        raise named(who.operator, error) from error.__cause__


def convert_(
    bridge: Bridge, arrays: Any, out: Any, src: Any, dst: Any, shape: Any, ids: Sequence[Any], stream: Any = None
) -> None:
    """Convert blocks into arrays that are there already."""
    who = bridge.caller("convert_", "input")
    try:
        source = _List.of(bridge, who, arrays)
        target = _List.of(bridge, bridge.caller("convert_", "output"), out)
        require_writable(target.who, target.seen)
        sides = _sides(who.operator, src, dst, shape, source)
        device = (source.seen or target.seen or [Seen(0, (), (), "", "cpu")])[0].device
        pool, into = (
            given.pool(side, given.blocks(side), device) for given, side in zip((source, target), sides, strict=True)
        )
        if into is not None:
            into.require_distinct()
        if pool is not None and into is not None:
            convert_pools(pool, into, *ids, stream=stream)
        elif (pool or into) is not None and not all(hasattr(one, "__len__") and len(one) == 0 for one in ids):
            raise BindError("there is no block on one side, and blocks to copy on the other")
    except KvbmError as error:
        raise named(who.operator, error) from error.__cause__


def _sides(operator: str, src: Any, dst: Any, shape: Any, source: _List) -> tuple[Side, Side]:
    text = shape_text(f"{operator}: shape", shape)
    sizes = block_shape(text, source.seen[0].dtype if source.seen else "uint8")
    sides = side_of(layout_name(f"{operator}: src", src), sizes), side_of(layout_name(f"{operator}: dst", dst), sizes)
    if sides[0].layout.planes or sides[1].layout.planes:
        require_copy(*sides)
    return sides
