"""What a cast lost: groups of zeros, saturated elements, NaN and errors, from what the two pools hold afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _core
from ..errors import MissingKernelError, PlanError
from ..layout import spec
from ..layout.axes import OF_A_BLOCK
from ..layout.region import Section, canonical
from ..layout.scales import QUANTISED, Group, group_of
from ..layout.shapes import BlockShape
from ..planner.cast import AMAX, PLAIN, Cast, Scale, as_cast
from ..planner.plan import between_layers, scales_of, value_pairs
from ..pool.pool import Pool, part_of
from ..pool.section import PoolSection
from .diff import on_host
from .transfer import Transfer

#: Bytes of the values of a batch in float32.  Several arrays of this size are held.
_BATCH_BYTES = 16 << 20

#: The least float32 |t| that saturates.
_SATURATES = {
    "float8_e4m3fn": np.nextafter(np.float32(464), np.float32(np.inf)),
    "float8_e5m2": np.float32(61440),
    "float4_e2m1fn": np.float32(7),
    "int8": np.float32(127.5),
}

_Floats = npt.NDArray[np.float32]
_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class CastReport:
    """What the quantised values of a batch have lost.

    Attributes
    ----------
    elements, groups : int
        Elements that were quantised, and groups of them that share a stored scale.
    groups_of_zeros : int
        Groups without a finite value other than zero.
    saturated : int
        Elements that are infinite or too large for the format.
    nan : int
        Elements that are NaN.
    largest_error, mean_error : float
        Of the relative errors ``|dequantised - x| / |x|`` of finite elements x other than zero, against the exact float32 product
        of code and scale.  inf if a finite x has become NaN or infinite, or zero something else: the destination then does not hold
        this cast of the source.
    """

    elements: int = 0
    groups: int = 0
    groups_of_zeros: int = 0
    saturated: int = 0
    nan: int = 0
    largest_error: float = 0.0
    mean_error: float = 0.0


def cast_report(
    src_pool: Pool | PoolSection, dst_pool: Pool | PoolSection, src_ids: Any = None, dst_ids: Any = None, *, cast: Cast,
    stream: Any = None,
) -> CastReport:  # fmt: skip
    """Count what quantising blocks has lost: compare the source with the destination after the copy.

    It copies the blocks of both pools to host memory as float32, some at a time, and compares them with NumPy on one core.  It is a
    diagnostic: far slower than the copy.

    Parameters
    ----------
    src_pool, dst_pool, src_ids, dst_ids, cast
        As they were passed to `convert` or `Transfer`; the blocks have not changed since.
    stream : optional
        For pools on a GPU: the stream of the copy, as for `convert`.  The call waits for it.

    Returns
    -------
    CastReport
        Of all pairs that were not skipped, and all planes that were quantised.

    Raises
    ------
    BindError
        Ids are out of range or repeated in the destination.
    LayoutError, PlanError
        There is no such cast, or it does not quantise.

    Examples
    --------
    >>> convert(engine_pool, storage_pool, [7, 3], [0, 1], cast="amax")  # doctest: +SKIP
    >>> cast_report(engine_pool, storage_pool, [7, 3], [0, 1], cast="amax").saturated  # doctest: +SKIP
    0
    """
    src, dst, scale = part_of(src_pool, "source"), part_of(dst_pool, "destination"), as_cast(cast)
    title = f"{src.pool.layout.name} → {dst.pool.layout.name}"
    for part in (src, dst):
        part.pool.require_open()
    made = between_layers(src.of, dst.of, title, None, scale)
    if scale is None or not any(part.formats[1] in QUANTISED for part in made.casts):
        formats = " and ".join(dict.fromkeys(f"{part.formats[0]} to {part.formats[1]}" for part in made.casts)) or "no cast"
        raise PlanError(
            f"{title}: cast_report: expected a cast to one of {', '.join(QUANTISED)}, got {formats}; for values that were "
            "dequantised, report the cast that quantised them"
        )
    ids = _core.Pairs(on_host(src_ids), on_host(dst_ids), src.num_ids, dst.num_ids).ids()
    pairs = [(one, other) for one, other in np.array(ids, np.int64).reshape(2, -1).T.tolist() if -1 not in (one, other)]
    total = _Total()
    for ours, theirs in value_pairs(src.of, dst.of):
        if _format(src.of, ours)[0] in PLAIN and _format(dst.of, theirs)[0] in QUANTISED:
            for one, other, own in _of_one_order(src, dst, ours, theirs, scale):
                plane = _Plane.of(one, other, ours, theirs, own, len(pairs))
                for x, y, e in plane.values(pairs, stream):
                    with _core.DefaultArithmetic():
                        total.add(x, y, e, plane)
    return total.report()


def _of_one_order(
    src: PoolSection, dst: PoolSection, ours: str, theirs: str, cast: Scale
) -> Iterator[tuple[PoolSection, PoolSection, Scale]]:
    """Both sides of a plane and its cast: once, or for K and for V if the quantised side has an order for each."""
    names = [name for name in (theirs, scales_of(dst.of).get(theirs)) if name]
    if all(access.half is None for access in dst.of.accesses if access.plane in (names or [""])):
        yield src, dst, cast
        return
    for o in range(dst.of.count("o")):
        own = cast if cast.k is None else Scale(cast.halves[o])
        yield src.section(planes=ours or None, o=o), dst.section(planes=names or None, o=o), own


class _Total:
    """The counts of all batches so far."""

    def __init__(self) -> None:
        self.elements = self.groups = self.zeros = self.saturated = self.nan = self.with_error = 0
        self.largest = self.sum = 0.0

    def add(self, x: _Floats, y: _Floats, e: _Floats, plane: _Plane) -> None:
        """Count elements.  `x`: the source; `y`: dequantised; `e`: effective scales.  Each has ``[ids, elements]``."""
        finite = np.isfinite(x)
        with np.errstate(all="ignore"):
            t = x * (np.float32(1) / e)  # a scale of a cast is so large that its reciprocal is finite
            self.saturated += int(np.count_nonzero(np.abs(t) >= _SATURATES[plane.dtype]))
            of = finite & ((x != 0) | (y != 0))
            error = np.abs(y[of].astype(np.float64) - x[of]) / np.abs(x[of].astype(np.float64))
        error[np.isnan(error)] = np.inf
        self.elements += x.size
        self.nan += int(np.count_nonzero(np.isnan(x)))
        self.with_error += error.size
        self.sum += float(error.sum())
        self.largest = max(self.largest, float(error.max(initial=0.0)))
        if plane.group is not None:
            found = _any_in_groups(plane.by_axes(finite & (x != 0)), plane.axes, plane.group)
            self.groups += found.size
            self.zeros += found.size - int(np.count_nonzero(found))

    def report(self) -> CastReport:
        mean = self.sum / self.with_error if self.with_error else 0.0
        return CastReport(self.elements, self.groups, self.zeros, self.saturated, self.nan, self.largest, mean)


def _any_in_groups(flags: _Flags, axes: Sequence[str], group: Group) -> _Flags:
    """Whether any flag of a group is set."""
    for number in reversed(range(len(axes))):
        if axes[number] == group.axis:
            shape = flags.shape
            flags = np.any(flags.reshape(*shape[: number + 1], -1, group.size, *shape[number + 2 :]), number + 2, keepdims=False)
        elif axes[number] in group.whole:
            flags = np.any(flags, number + 1, keepdims=False)
    return flags


#: Digits of coordinates, the slowest first: an axis, ``coordinate // divisor % extent`` of it, and the size of the axis.
_Digits = tuple[tuple[str, int, int, int], ...]

#: Copies, and whose ids they have: 0 those of the source, 1 those of the destination, 2 numbers from 0.
_Moves = tuple[tuple[Transfer, int], ...]


class _Plane(NamedTuple):
    """A plane that was quantised, and the copies of its values to arrays of float32 in one order.

    It is the order of the quantised side.  So there are no more loops than in the cast that is reported.
    """

    dtype: str  # the quantised format
    #: The axes of the elements, and the digits of their coordinates in the order of the arrays.
    axes: tuple[str, ...]
    digits: _Digits
    group: Group | None  # the elements that share a stored scale
    #: What the source holds; what the destination holds, dequantised; the effective scale of each element.
    x: Pool
    y: Pool
    e: Pool
    #: From the source to `x`; from the destination to `y`; from the scales of the destination to those of a pool in
    #: which all codes are those of 1; from this pool to `e`.  Without stored scales not the last two: `e` does not
    #: change.
    moves: _Moves

    @classmethod
    def of(cls, src: PoolSection, dst: PoolSection, ours: str, theirs: str, cast: Scale, pairs: int) -> _Plane:
        """The plane of these names."""
        dtype, sizes = _format(dst.of, theirs)
        digits = _digits(dst.of, theirs)
        name = scales_of(dst.of).get(theirs, "")
        count = max(1, min(pairs, _BATCH_BYTES // (4 * math.prod(sizes.values()))))
        device = "pinned" if any(part.pool.device != "cpu" for part in (src, dst)) else "cpu"

        pool = partial(_scratch, digits=digits, blocks=count, device=device)
        one, group, own = Scale(1.0), None, cast
        # Planes of float32 are not cast, and need their name: beside a plane that nobody uses, as one alone has no name.
        x = pool("float32", names=(ours, f"{ours}x"), scale_dtype="uint8") if ours else pool("float32")
        y, e = pool("float32"), pool("float32")
        mine, its = (part.section(planes=plane or None) for part, plane in ((src, ours), (dst, theirs)))
        if name:
            scale_dtype, scale_sizes = _format(dst.of, name)
            group = group_of(theirs, sizes, name, scale_sizes)
            its = dst.section(planes=[theirs, name])
            own = cast if scale_dtype == "float8_e4m3fn" else AMAX
            ones = pool(dtype, names=(theirs, name), scale_dtype=scale_dtype, scale_digits=_digits(dst.of, name))
        else:
            ones = pool(dtype)
        e.arrays[0][:] = 1
        Transfer(e, ones.section(planes=theirs) if name else ones, "direct", cast=one).copy()
        moves = [(move, 0) for move in _moves(mine, x.section(planes=ours or None), one, sizes)]
        moves.append((Transfer(its, y, "direct", cast=own), 1))
        back = Transfer(ones, e, "direct", cast=own)
        if name:
            moves += [(Transfer(dst.section(planes=name), ones.section(planes=name), "direct"), 1), (back, 2)]
        else:
            back.copy()
        return cls(dtype, tuple(sizes), digits, group, x, y, e, tuple(moves))

    def values(self, pairs: Sequence[tuple[int, int]], stream: Any) -> Iterator[tuple[_Floats, _Floats, _Floats]]:
        """Arrays of `x`, `y` and `e`, some pairs at a time: ``[ids, elements]``."""
        for first in range(0, len(pairs), self.x.num_blocks):
            some = pairs[first : first + self.x.num_blocks]
            ids: list[Any] = [*(list(side) for side in zip(*some, strict=True)), range(len(some))]
            for move, side in self.moves:
                move.copy(ids[side], range(len(some)), stream=stream if move.device >= 0 else None).synchronize()
            x, y, e = (pool.arrays[0].reshape(pool.num_blocks, -1)[: len(some)] for pool in (self.x, self.y, self.e))
            yield x, y, e

    def by_axes(self, flags: _Flags) -> _Flags:
        """Flags of elements with a dimension for each axis behind that of ids."""
        apart = flags.reshape(-1, *(extent for _, _, extent, _ in self.digits))
        order = sorted(range(len(self.digits)), key=lambda k: (self.axes.index(self.digits[k][0]), -self.digits[k][1]))
        sizes = {axis: size for axis, _, _, size in self.digits}
        return apart.transpose(0, *(1 + k for k in order)).reshape(-1, *(sizes[axis] for axis in self.axes))


def _moves(src: PoolSection, dst: PoolSection, cast: Scale, sizes: Mapping[str, int]) -> Iterator[Transfer]:
    """The copy from the source, or one for each coordinate of its shortest axes if kernels have too few loops for all."""
    try:
        yield Transfer(src, dst, "direct", cast=cast)
        return
    except MissingKernelError:
        if not sizes:
            raise
    axis = min(sizes, key=lambda axis: sizes[axis])
    rest = {other: size for other, size in sizes.items() if other != axis}
    for index in range(sizes[axis]):
        at: dict[str, Any] = {axis: index}
        yield from _moves(src.section(**at), dst.section(**at), cast, rest)


def _format(section: Section, plane: str) -> tuple[str, dict[str, int]]:
    """Dtype of a plane, and the sizes of its axes without those of one coordinate."""
    access = next(access for access in section.accesses if access.plane == plane)
    sizes = {axis: section.count(axis) if axis in dict(section.chosen) else size for axis, size in access.sizes}
    return access.dtype, {axis: sizes[axis] for axis in sorted(sizes, key=canonical) if sizes[axis] > 1}


def _digits(section: Section, plane: str) -> _Digits:
    """The digits of a plane's coordinates in its own order; an axis with a list of coordinates is one digit."""
    access = next(access for access in section.accesses if access.plane == plane)
    sizes, chosen, packed = _format(section, plane)[1], dict(section.chosen), "".join(access.packed)
    steps = [step for step in access.steps if step.axes[0] not in chosen]
    for axis in chosen.keys() & sizes.keys():
        low = access.pack if axis == packed else 1
        steps.append(access.digits(axis)[-1]._replace(divisor=low, extent=sizes[axis] // low))
    steps.sort(key=lambda step: (-step.entries, -step.nbytes))
    found: list[tuple[str, int, int, int]] = []
    for axis, divisor, extent in [*((step.axes[0], step.divisor, step.extent) for step in steps), (packed, 1, access.pack)]:
        if extent > 1:
            if found and found[-1][:2] == (axis, divisor * extent):
                extent *= found.pop()[2]
            found.append((axis, divisor, extent, sizes[axis]))
    return tuple(found)


def _text(digits: _Digits) -> list[str]:
    """Digits as a layout file has them: ``t/4%2``."""
    return [
        axis + (f"/{divisor}" if divisor > 1 else "") + (f"%{extent}" if divisor * extent < size else "")
        for axis, divisor, extent, size in digits
    ]


def _scratch(
    dtype: str, digits: _Digits, blocks: int, device: str, names: tuple[str, str] = ("", ""), scale_dtype: str = "",
    scale_digits: _Digits = (),
) -> Pool:  # fmt: skip
    """A pool in host memory: elements in the order of `digits`; with `names` also their scales, or another plane beside float32."""
    sizes, scale_sizes = ({axis: size for axis, _, _, size in some} for some in (digits, scale_digits))
    more = {axis: size for axis, size in {**sizes, **scale_sizes}.items() if axis not in OF_A_BLOCK}
    order = " ".join(("b", *(axis for axis in OF_A_BLOCK if axis not in sizes), *_text(digits)))  # axes of one coordinate first
    planes = ""
    if scale_dtype:
        own = [*(axis for axis in "loht" if axis not in sizes and axis not in scale_sizes), *_text(scale_digits)]
        shared = " ".join(axis for axis in "loht" if axis in sizes and axis not in scale_sizes)
        planes = (
            f"planes:\n  {names[0]}: {{order: {order[2:]}, dtype: {dtype}}}\n  {names[1]}: {{order: {' '.join(own)}, dtype: "
            f"{scale_dtype}{f', scales: {names[0]}' if dtype in QUANTISED else ''}{f', shared: {shared}' if shared else ''}}}\n"
        )
        order = f"[<{' '.join(names)}>] b"
    axes = f"axes: {{{', '.join(f'{axis}: {size}' for axis, size in more.items())}}}\n" if more else ""
    layout = spec.parse(f'order: "{order}"\n{axes}{planes}', name="cast_report")
    nl, no, nh, nt, hd = (sizes.get(axis, 1) for axis in OF_A_BLOCK)
    return Pool.allocate(layout, BlockShape(nl=nl, no=no, nh=nh, nt=nt, hd=hd, dtype=dtype), blocks, device)
