"""The common part of the bridges to NumPy, CuPy, Numba and JAX: functions from lists of arrays to lists of arrays.

A bridge is one file that describes and creates its framework's arrays.  Everything else is here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ._arguments import require_a
from .copy.transfer import convert as convert_pools
from .errors import BindError, KvbmError
from .layout.layout import Layout
from .layout.shapes import BlockShape
from .matching.match import names_of_strides
from .memory.allocation import Arrays
from .memory.array_checks import (
    Caller,
    Kind,
    Side,
    layout_name,
    named,
    require,
    require_copy,
    require_device,
    require_writable,
    shape_text,
    sides_of,
)
from .memory.array_info import Array, describe
from .planner.cast import Cast, Scale, as_cast
from .pool.pool import Pool


class Bridge(NamedTuple):
    """Describes and creates a framework's arrays, and has the two functions of every bridge."""

    name: str  # of the framework, in messages
    expected: str  # the accepted type, in messages
    takes: Callable[[Any], bool]  # true for the framework's arrays
    contiguous: str  # the framework's function that makes an array contiguous, for messages
    #: A new array of a kind, not initialised, on the device of `like`, with the kind's dtype or that of `like`.
    empty: Callable[[Kind, Any], Any]
    look: Callable[[Any, str], Array] = describe  # as `kvbm.memory.array_info.describe`
    #: From a stream and an array: a context in which arrays are created and copied; it yields the stream of the copy.
    ordered: Callable[[Any, Any], AbstractContextManager[Any]] = lambda stream, _: nullcontext(stream)

    def caller(self, operator: str, argument: str) -> Caller:
        return Caller(f"{self.name}.{operator}", argument, self.contiguous)

    def convert(
        self,
        arrays: Any,
        src: str | Path | Layout,
        dst: str | Path | Layout,
        shape: str | BlockShape,
        *,
        stream: Any = None,
        cast: Cast = None,
    ) -> list[Any]:
        """Convert blocks from one layout into new arrays of another.

        Parameters
        ----------
        arrays : sequence of the framework's arrays
            One array per allocation of the source's layout, in table order.  The layout's order gives each shape.  Dtypes of
            ml_dtypes (bfloat16, float8_e4m3fn, float8_e5m2) are accepted.
        src, dst : str, Path or Layout
            Layouts: names, or paths of YAML files.  A `Layout` must have been loaded from a file.
        shape : str or BlockShape
            Sizes of a block, or a text that `kvbm.load_shape` reads.  Without a dtype, that of the arrays is used.
        stream : optional
            The stream of a copy on a GPU, as for `kvbm.convert`.  Default: the framework's current stream.
        cast : {"amax"} or kvbm.Scale, optional
            Change the format of values, as for `kvbm.Transfer`.  Then `shape` must have a dtype: that of the result where its
            layout has no planes.

        Returns
        -------
        list of the framework's arrays
            One array per allocation of the destination's layout, with the inputs' dtype, or that of `shape` with a cast; with
            several planes, that of the plane.

        Raises
        ------
        BindError, DTypeError
            The arrays do not fit.  The message names the input and what to do.
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
            scale = as_cast(cast)
            sides = _sides(who.operator, src, dst, shape, source, None, scale)
            blocks = source.blocks(sides[0])
            if not source.arrays:
                if sides[1].arrays_a_block:
                    return []
                raise BindError(f"inputs: expected at least one array, which gives the dtype and the device of {sides[1]}")
            like = source.arrays[0]
            pool = source.pool(sides[0], blocks, source.seen[0].device)
            sized = sides[1].sized(blocks)
            kinds = [sized.kind(index) for index in range(sized.arrays)]
            if scale is not None:
                kinds = [kind._replace(dtype=kind.dtype or sides[1].shape.dtype) for kind in kinds]
            with self.ordered(stream, like) as ordered:
                out = [self.empty(kind, like) for kind in kinds]
                if pool is not None:
                    target = _List.of(self, self.caller("convert", "output"), out)
                    into = target.pool(sides[1], blocks, source.seen[0].device)
                    assert into is not None
                    convert_pools(pool, into, stream=ordered, cast=scale)
            return out
        except KvbmError as error:
            raise named(who.operator, error) from error.__cause__

    def convert_(
        self,
        arrays: Any,
        out: Any,
        src: str | Path | Layout,
        dst: str | Path | Layout,
        shape: str | BlockShape,
        src_ids: Any = None,
        dst_ids: Any = None,
        *,
        stream: Any = None,
        cast: Cast = None,
    ) -> None:
        """Convert blocks into existing arrays.  Ids are as for `kvbm.convert`; they may be on the GPU.

        With a cast, arrays of a layout without planes have their own dtype.

        Raises
        ------
        BindError, DTypeError, LayoutError, PlanError, SpecError
            As `convert`; also if the destination is read-only.  Nothing was written.
        """
        who, ids = self.caller("convert_", "input"), (src_ids, dst_ids)
        try:
            source = _List.of(self, who, arrays)
            target = _List.of(self, self.caller("convert_", "output"), out)
            require_writable(target.who, target.seen)
            scale = as_cast(cast)
            sides = _sides(who.operator, src, dst, shape, source, target, scale)
            device = (source.seen or target.seen or [Array(0, (), (), "", "cpu")])[0].device
            pool, into = (
                given.pool(side, given.blocks(side), device)
                for given, side in zip((source, target), sides, strict=True)
            )
            if into is not None:
                into.require_distinct()
            if pool is not None and into is not None:
                with self.ordered(stream, source.arrays[0]) as ordered:
                    convert_pools(pool, into, *ids, stream=ordered, cast=scale)
            elif (pool or into) is not None and not all(hasattr(one, "__len__") and len(one) == 0 for one in ids):
                raise BindError("ids: one side has no blocks: expected empty src_ids and dst_ids")
        except KvbmError as error:
            raise named(who.operator, error) from error.__cause__


def views(pool: Pool, who: str, advice: str, *, on_gpu: bool) -> list[tuple[Any, str]]:
    """A pool's arrays and the dtypes of their items, for a framework on the GPU or on the CPU."""
    require_a(Pool, "pool", pool, "a kvbm.Pool")
    pool.require_open()
    if on_gpu == (pool.device == "cpu"):
        expected = "a GPU" if on_gpu else "the CPU"
        raise BindError(f"{who}.arrays: the pool is on {pool.device}; expected one on {expected}: {advice}")
    kinds = pool.resolved.kinds
    return [(array, kinds[kind].dtype) for array, kind in zip(pool.arrays, pool.resolved.kind_of_entry, strict=True)]


class _List(NamedTuple):
    """Arrays of the caller, and their descriptions."""

    who: Caller
    arrays: list[Any]
    seen: list[Array]

    @classmethod
    def of(cls, bridge: Bridge, who: Caller, arrays: Any) -> _List:
        given = list(arrays) if issubclass(type(arrays), list | tuple | Arrays) else [arrays]  # whatever it says of its class
        seen = []
        for index, array in enumerate(given):
            try:
                takes = bridge.takes(array)
            except Exception:  # the object's own code
                takes = False
            if not takes:
                kind = type(array)
                raise BindError(
                    f"{who(index)} is a {kind.__module__.partition('.')[0]}.{kind.__name__}; expected {bridge.expected}"
                )
            seen.append(bridge.look(array, who(index)))
        return cls(who, given, seen)

    def blocks(self, side: Side) -> int:
        return int(side.blocks(self.who, [one.shape for one in self.seen]))

    def pool(self, side: Side, blocks: int, device: str) -> Pool | None:
        """A pool of the arrays after all checks; None for no blocks."""
        if self.seen:
            require_device(self.who(0), self.seen[0].device, "input #0", device)
        fitting = self.who._replace(fitting=lambda: names_of_strides(self.seen, side.shape, side.layout.name))
        require(fitting, self.seen, side.sized(blocks))
        if not blocks:
            return None
        return Pool.trusted(side.layout, side.shape, self.seen, self.arrays)


def _sides(
    operator: str, src: Any, dst: Any, shape: Any, source: _List, target: _List | None, cast: Scale | None
) -> tuple[Side, Side]:
    text = shape_text(f"{operator}: shape", shape)
    names = layout_name(f"{operator}: src", src), layout_name(f"{operator}: dst", dst)
    found, out = (of.seen[0].dtype if of and of.seen else None for of in (source, target))
    sides = sides_of(*names, text, found or "uint8", out if target is None else out or found or "uint8", cast)
    if cast is not None or sides[0].layout.planes or sides[1].layout.planes:
        require_copy(*sides, cast)
    return sides
