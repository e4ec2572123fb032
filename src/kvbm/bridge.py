"""Lists of arrays in, lists of arrays out: what the bridges to NumPy, CuPy, Numba and JAX have in common.

A bridge is one file that says how its framework's arrays are looked at and made; everything else stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from .arrays import Array, describe
from .contract import (
    Caller,
    Kind,
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
from .pool import Pool
from .shapes import BlockShape
from .transfer import convert as convert_pools

__all__ = ["Bridge", "views"]


class Bridge(NamedTuple):
    """How a framework's arrays are looked at and made, and the two functions that every framework has.

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
        As `kvbm.arrays.describe`.
    ordered : callable
        ``(stream, like)``: a context in which arrays are made and copied, and which gives the stream to copy on.
    """

    name: str
    expected: str
    takes: Callable[[Any], bool]
    contiguous: str
    empty: Callable[[Kind, Any], Any]
    look: Callable[[Any, str], Array] = describe
    ordered: Callable[[Any, Any], AbstractContextManager[Any]] = lambda stream, _: nullcontext(stream)

    def caller(self, operator: str, argument: str) -> Caller:
        return Caller(f"{self.name}.{operator}", argument, self.contiguous)

    def convert(
        self,
        arrays: Any,
        src: str = "nhd",
        dst: str = "universal",
        shape: str | BlockShape = "",
        *,
        stream: Any = None,
    ) -> list[Any]:
        """Convert blocks from one layout into new arrays of another.

        Parameters
        ----------
        arrays : sequence of the framework's arrays
            One an allocation of the source's layout, in table order, each shaped as its order says.  dtypes of ml_dtypes
            (bfloat16, float8_e4m3fn, float8_e5m2) are taken as they are.
        src, dst : str
            Layouts, by name or by the path of a YAML file.
        shape : str or BlockShape
            As `kvbm.load_shape` reads it.  Sizes without a dtype take the arrays'.
        stream : optional
            Where a copy on a GPU is ordered, as for `kvbm.convert`.  Not given: the framework's current stream.

        Returns
        -------
        list of the framework's arrays
            One an allocation of the destination's layout, of the inputs' dtype, or of its plane's where a layout has several.

        Raises
        ------
        BindError, DTypeError
            Arrays that do not fit: the sentence names the input and the remedy.
        LayoutError, PlanError, SpecError
            There is no copy between the two layouts, or no such layout or shape.

        Examples
        --------
        >>> import numpy as np, kvbm.numpy
        >>> layers = [np.zeros((2, 6, 16, 4, 8), "float32") for _ in range(3)]  # [l] o b t h d
        >>> blocks = kvbm.numpy.convert(layers, "vllm/flash_attn_nhd", "universal", "nl=3,no=2,nh=4,nt=16,hd=8")
        >>> len(blocks), blocks[0].shape  # [b] h l o t d
        (6, (4, 3, 2, 16, 8))
        """
        who = self.caller("convert", "input")
        try:
            source = _List.of(self, who, arrays)
            sides = _sides(who.operator, src, dst, shape, source)
            blocks = source.blocks(sides[0])
            if not source.arrays:
                if sides[1].arrays_a_block:
                    return []
                raise BindError(
                    f"inputs: expected at least one array, which tells the dtype and the device of {sides[1]}"
                )
            like = source.arrays[0]
            pool = source.pool(sides[0], blocks, source.seen[0].device)
            sized = sides[1].sized(blocks)
            with self.ordered(stream, like) as ordered:
                out = [self.empty(sized.kind(index), like) for index in range(sized.arrays)]
                if pool is not None:
                    target = _List.of(self, self.caller("convert", "output"), out)
                    into = target.pool(sides[1], blocks, source.seen[0].device)
                    assert into is not None
                    convert_pools(pool, into, stream=ordered)
            return out
        except KvbmError as error:
            raise named(who.operator, error) from error.__cause__

    def convert_(
        self,
        arrays: Any,
        out: Any,
        src: str = "nhd",
        dst: str = "universal",
        shape: str | BlockShape = "",
        src_ids: Any = None,
        dst_ids: Any = None,
        *,
        stream: Any = None,
    ) -> None:
        """Convert blocks into arrays that are there already; ids are those of `kvbm.convert`, on the GPU too.

        Raises
        ------
        BindError, DTypeError, LayoutError, PlanError, SpecError
            As `convert`; a destination that is read-only.  Nothing was written.
        """
        who, ids = self.caller("convert_", "input"), (src_ids, dst_ids)
        try:
            source = _List.of(self, who, arrays)
            target = _List.of(self, self.caller("convert_", "output"), out)
            require_writable(target.who, target.seen)
            sides = _sides(who.operator, src, dst, shape, source)
            device = (source.seen or target.seen or [Array(0, (), (), "", "cpu")])[0].device
            pool, into = (
                given.pool(side, given.blocks(side), device)
                for given, side in zip((source, target), sides, strict=True)
            )
            if into is not None:
                into.require_distinct()
            if pool is not None and into is not None:
                with self.ordered(stream, source.arrays[0]) as ordered:
                    convert_pools(pool, into, *ids, stream=ordered)
            elif (pool or into) is not None and not all(hasattr(one, "__len__") and len(one) == 0 for one in ids):
                raise BindError("there is no block on one side, and blocks to copy on the other")
        except KvbmError as error:
            raise named(who.operator, error) from error.__cause__


def views(pool: Pool, who: str, advice: str, *, on_gpu: bool) -> list[tuple[Any, str]]:
    """A pool's arrays and the dtypes of their items, for a framework of GPUs or of the CPU."""
    pool.require_open()
    if on_gpu == (pool.device == "cpu"):
        expected = "a GPU" if on_gpu else "the CPU"
        raise BindError(f"{who}.arrays: the pool is on {pool.device}; expected one on {expected}: {advice}")
    kinds = pool.resolved.kinds
    return [(array, kinds[kind].dtype) for array, kind in zip(pool.arrays, pool.resolved.kind_of_entry, strict=True)]


class _List(NamedTuple):
    """Arrays as they were given, and as they are seen."""

    who: Caller
    arrays: list[Any]
    seen: list[Array]

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
            seen.append(bridge.look(array, who(index)))
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
        return Pool.trusted(side.layout, side.shape, self.seen, self.arrays)


def _sides(operator: str, src: Any, dst: Any, shape: Any, source: _List) -> tuple[Side, Side]:
    text = shape_text(f"{operator}: shape", shape)
    sizes = block_shape(text, source.seen[0].dtype if source.seen else "uint8")
    sides = side_of(layout_name(f"{operator}: src", src), sizes), side_of(layout_name(f"{operator}: dst", dst), sizes)
    if sides[0].layout.planes or sides[1].layout.planes:
        require_copy(*sides)
    return sides
