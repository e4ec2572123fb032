"""Checks of the arrays of a pool or of a call, before anything accesses them.

`GATES` is the list of checks.  Each raises an error with one sentence: the operator, the argument, what was expected, what was
found, and what to do.  No framework is imported or needed here.
"""

from __future__ import annotations

import contextlib
import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .._arguments import quoted, require_a
from ..errors import BindError, DTypeError, KvbmError, SpecError
from ..layout.layout import Layout
from ..layout.loops import loops_of
from ..layout.naming import SPELLINGS
from ..layout.resolved import Resolved, legal
from ..layout.shapes import ITEMSIZE, LIMIT, BlockShape, load_shape
from ..layout.spec import load
from ..planner.cast import Scale
from ..planner.plan import plan
from .array_info import Array, dense, other_order, same_dtype, span, stand_ins

#: Integers that may be read as any other dtype of one byte, and the reverse: the bits do not change.
_BITS8 = ("uint8", "int8", "void8")


class Kind(NamedTuple):
    """The required form of an array of a layout: axes, items along each axis, bytes between neighbours.

    `dtype` is empty if it is the dtype of the shape.  In layouts of several planes it is the dtype of an item.  If planes share an
    array, `whole` is its bytes with all padding: any shape with these bytes in their order is accepted.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str = ""
    whole: int = 0


#: A number of blocks: an int, or a compiler's symbol.
Size = Any


class Sized(NamedTuple):
    """One side of a copy with its number of blocks: the number of arrays, and the required form of each."""

    side: Side
    num_blocks: Size
    arrays: int
    kinds: tuple[Kind, ...]
    which: bytes | None

    def kind(self, index: int) -> Kind:
        return self.kinds[self.which[index] if self.which else 0]

    def elements(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], str, int], ...]:
        """For each kind: shape, strides in items (as in torch), dtype, and `Kind.whole`."""
        found = []
        for kind in self.kinds:
            if any(stride % kind.itemsize for stride in kind.strides if type(stride) is int):
                raise BindError(
                    f"{self.side.layout.name}: strides of {kind.strides} bytes are not multiples of a "
                    f"{kind.dtype or self.side.shape.dtype}; use kvbm.Pool for such a pitch"
                )
            found.append(
                (kind.shape, tuple(stride // kind.itemsize for stride in kind.strides), kind.dtype, kind.whole)
            )
        return tuple(found)

    @property
    def nbytes(self) -> int:
        """Bytes from the first item to the end of the last, of the largest array."""
        return max(span(kind.shape, kind.strides, kind.itemsize) for kind in self.kinds)


class Caller(NamedTuple):
    """Words for messages: the operator, the argument, a mark such as ``#``, and how the framework makes an array contiguous.

    `label` returns the layout's label of an array, such as ``l=3``; `fitting` returns names of layouts with the arrays' strides.
    """

    operator: str
    argument: str
    contiguous: str = ".contiguous()"
    mark: str = "#"
    label: Callable[[int], str] = lambda _: ""
    fitting: Callable[[], Sequence[str]] = tuple

    def __call__(self, index: int) -> str:
        label = self.label(index)
        return f"{self.operator}: {self.argument} {self.mark}{index}{f' ({label})' if label else ''}"


# ---- the gates -----------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """An array to check, the first array of its list, and the required form."""

    who: Caller
    number: int
    seen: Array
    first: Array
    kind: Kind
    shape: BlockShape

    @property
    def name(self) -> str:
        return self.who(self.number)


def on_one_device(at: Look) -> None:
    """All arrays are on one device."""
    if at.seen.device != at.first.device:  # names are computed only for a message
        require_device(at.name, at.seen.device, f"{at.who.argument} {at.who.mark}0", at.first.device)


def of_one_dtype(at: Look) -> None:
    """All arrays of a list have one dtype, unless planes have their own."""
    if not at.kind.dtype and at.seen.dtype != at.first.dtype:
        raise DTypeError(
            f"{at.name} is {at.seen.dtype}, {at.who.argument} {at.who.mark}0 {at.first.dtype}; expected one dtype for all"
        )


def holds_the_dtype(at: Look) -> None:
    """The dtype is that of the shape or plane, or its bits can be read as that."""
    if reads_as(at.seen.dtype, at.kind.dtype or at.shape.dtype):
        return
    if at.kind.whole:
        raise DTypeError(
            f"{at.name}: its planes share it, so expected bytes (uint8, or another dtype of one byte), got {at.seen.dtype}; pass "
            ".view(torch.uint8)"
        )
    why = "the layout's planes say" if at.kind.dtype else "the shape says"
    require_dtype(at.name, at.seen.dtype, at.kind.dtype or at.shape.dtype, why)


def of_steps_forward(at: Look) -> None:
    """No stride is 0 or negative: no layout has such an array."""
    if any(type(n) is int and n == 0 for n in at.seen.shape):
        return
    for axis, (n, stride) in enumerate(zip(at.seen.shape, at.seen.strides, strict=True)):
        if type(stride) is not int or stride > 0 or type(n) is not int or n < 2:
            continue
        if stride < 0:
            why = "it is a reversed view, such as [::-1], and no layout counts down: pass the array that it is a view of"
        else:
            why = (
                "its items are all in one place, as after expand or broadcast_to: pass an array with an item for each index, as "
                ".copy() (NumPy) or .contiguous() (torch) returns"
            )
        raise BindError(f"{at.name}: expected strides above 0, got a stride of {stride} bytes along axis {axis} of {n}; {why}")


def of_the_bytes(at: Look) -> None:
    """Records are bytes in any shape, with or without the padding."""
    seen, kind = at.seen, at.kind
    if not kind.whole or (seen.shape == kind.shape and _steps_alike(at)):
        return
    dense_or_not = (loops_of(kind.shape, kind.strides), [(kind.whole, 1)])
    if loops_of(seen.shape, seen.strides) not in dense_or_not:
        padded = f", or dense, {kind.whole} bytes with the padding" if kind.whole != math.prod(kind.shape) else ""
        raise BindError(
            f"{at.name}: expected bytes of shape {_tuple(kind.shape)} ({' '.join(kind.axes)}) and strides {_tuple(kind.strides)}, "
            f"or another shape of the same bytes{padded}; got shape {_tuple(seen.shape)} and strides of {_tuple(seen.strides)} "
            "bytes"
        )


def of_the_rank(at: Look) -> None:
    """The array has as many axes as the layout."""
    if len(at.seen.shape) != len(at.kind.shape) and not at.kind.whole:
        raise BindError(f"{at.name}: {wrong_rank(at.seen, at.kind)}")


def of_the_shape(at: Look) -> None:
    """The array has the layout's number of elements along each axis."""
    for axis, want, got in zip(at.kind.axes, at.kind.shape, at.seen.shape, strict=False):
        if want != got and not at.kind.whole:
            kind = at.kind if axis == "b" else _with_blocks(at.kind, at.seen)
            raise BindError(
                f"{at.name}: axis '{axis}': expected {want}, got {got} (shape {_tuple(at.seen.shape)}, expected "
                f"{_tuple(kind.shape)}); {_reshape(at.seen, kind)}"
            )


def of_the_strides(at: Look) -> None:
    """The array has the strides of the layout: contiguous, unless the layout declares a pitch."""
    seen, kind = at.seen, at.kind
    if kind.whole or _steps_alike(at):
        return
    where = f" at storage offset {seen.offset}" if seen.offset else ""
    if names := at.who.fitting():
        raise BindError(
            f"{at.name}: expected strides of {_tuple(kind.strides)} bytes, got {_tuple(seen.strides)}{where}; these strides are "
            f"those of {' and '.join(names)}: name that layout, and permute the axes of the view to its order; `kvbm.match` lists "
            "all layouts that fit"
        )
    if kind.strides == dense(kind.shape, kind.itemsize):
        advice = other_order(kind.axes, seen.strides, at.who.contiguous if at.who.argument == "input" else "")
        raise BindError(
            f"{at.name}: expected a contiguous array, got strides of {_tuple(seen.strides)} bytes{where}, a slice or a "
            f"transpose of another; {advice}"
        )
    raise BindError(
        f"{at.name}: expected strides of {_tuple(kind.strides)} bytes, the layout's pitch, got {_tuple(seen.strides)}{where}; "
        "allocate it with those strides (torch.empty_strided), or use a layout without a pitch"
    )


def _steps_alike(at: Look) -> bool:
    """True if the array has the strides of the kind along every axis longer than one."""
    seen, kind = at.seen, at.kind
    return all(a == b or n == 1 for n, a, b in zip(seen.shape, seen.strides, kind.strides, strict=False)) or any(
        type(n) is int and n == 0 for n in seen.shape
    )


#: Checks of what the arrays of a list must have in common.
ALIKE: tuple[Callable[[Look], None], ...] = (on_one_device, of_one_dtype, holds_the_dtype)

#: Checks for every array of a list, in this order.
GATES: tuple[Callable[[Look], None], ...] = (
    *ALIKE, of_steps_forward, of_the_bytes, of_the_rank, of_the_shape, of_the_strides,
)  # fmt: skip


def require(who: Caller, seen: Sequence[Array], sized: Sized) -> None:
    """Run all checks on a list of arrays.  Raises an error for the first array that fails."""
    if len(seen) != sized.arrays:
        raise BindError(
            f"{who.operator}: {who.argument}s: {sized.side} holds {sized.num_blocks} blocks in {sized.arrays} arrays, got "
            f"{len(seen)}"
        )
    require_each(who, seen, sized.kinds, sized.which, sized.side.shape)


def require_each(
    who: Caller, seen: Sequence[Array], kinds: Sequence[Kind], which: Sequence[int] | None, shape: BlockShape,
    gates: Sequence[Callable[[Look], None]] = GATES,
) -> None:  # fmt: skip
    """Run checks on arrays, one by one.  The kind of an array is ``kinds[which[index]]``, or the only kind."""
    passed: dict[int, Array] = {}  # the last of each kind: an equal one passes, too
    for index, array in enumerate(seen):
        kind = which[index] if which else 0
        if kind in passed and passed[kind][1:5] == array[1:5]:  # shape, strides, dtype, device
            continue
        look = Look(who, index, array, seen[0], kinds[kind], shape)
        for gate in gates:
            gate(look)
        passed[kind] = array


def require_writable(who: Caller, seen: Sequence[Array]) -> None:
    """Raise `BindError` for a destination that is read-only."""
    for index, array in enumerate(seen):
        if array.readonly:
            raise BindError(f"{who(index)} is read-only; expected a writable array: pass a copy of it")


def require_device(one: str, device: str, other: str, expected: str) -> None:
    """Raise `BindError` unless both are on one device.  The message says what to use instead."""
    if device == expected:
        return
    kinds = {device.partition(":")[0], expected.partition(":")[0]}
    if kinds == {"cuda"}:
        advice = (
            "between two GPUs construct kvbm.Transfer(source_pool, destination_pool), each kvbm.Pool on its own, or move "
            f"it first: .to('{expected}')"
        )
    elif kinds == {"cuda", "cpu"}:
        advice = (
            "between a GPU and the host construct kvbm.Transfer(source_pool, destination_pool) with pinned memory, or move it "
            f"first: .to('{expected}')"
        )
    else:
        advice = f"move it first: .to('{expected}')"
    raise BindError(f"{one} is on {device}, {other} on {expected}; expected one device: {advice}")


def require_dtype(name: str, found: str, wanted: str, why: str = "the shape says") -> None:
    """Raise `DTypeError` unless the dtype is the expected one, or its bits can be read as that."""
    if reads_as(found, wanted):
        return
    of_the_shape = why == "the shape says"
    if _width(found) == _width(wanted) == 1:
        advice = "two formats of one byte can only be copied as bits: pass its .view(torch.uint8)"
    elif of_the_shape and _width(found) == 0:
        advice = f"no block holds {found}: convert the values before"
    elif of_the_shape:
        advice = f"a copy converts no dtype: pass shape='…,dtype={found}', or convert the values before"
    else:
        advice = "a copy converts no dtype: convert the values before"
    bits = " or ".join(stand_ins(wanted)[:2])
    advice += f"; {bits} may hold the bits" if bits else ""
    raise DTypeError(f"{name}: expected {wanted}, as {why}, got {found}; {advice}")


def reads_as(found: str, wanted: str) -> bool:
    """True if memory of dtype `found` can be used as `wanted`: equal, or integers of the same width.

    Examples
    --------
    >>> reads_as("uint8", "float8_e4m3fn"), reads_as("float8_e5m2", "int8"), reads_as("float8_e5m2", "float8_e4m3fn")
    (True, True, False)
    """
    one_byte = _width(found) == _width(wanted) == 1
    return same_dtype(found, wanted) or (one_byte and (found in _BITS8 or wanted in _BITS8))


def formats_of(resolved: Resolved, dtypes: Sequence[str], title: str) -> dict[str, str]:
    """The formats of arrays of bytes that say more than their layout: plane → dtype, such as ``{"": "float8_e5m2"}``.

    Where a shape or a plane says uint8 or int8, an array of any dtype of one byte is accepted.  Its own dtype is then the
    format of its bytes: a copy between arrays of two formats would change values.  Arrays of uint8, int8 and raw bytes have no
    format.

    `dtypes` are those of the arrays, in table order.  Raises `DTypeError` if arrays of one plane have two formats.
    """
    which: Sequence[int] = resolved.kind_of_entry if len(resolved.kinds) > 1 else ()
    looks = set(zip(which, dtypes, strict=True)) if which else {(0, dtype) for dtype in set(dtypes)}
    found: dict[str, str] = {}
    if all(dtype == resolved.kinds[kind].dtype for kind, dtype in looks):
        return found
    owners = [""] * len(resolved.kinds)
    if resolved.has_separate_planes:
        owners = [part.plane for part in resolved.planes for _ in part.kinds]
    for kind, dtype in sorted(looks):
        name = format_of(dtype, resolved.kinds[kind].dtype)
        if name and (other := found.setdefault(owners[kind], name)) != name:
            raise DTypeError(f"{title}: {_of_plane(owners[kind])}arrays of {other} and of {name}; {ONE_FORMAT}")
    raw = [part.plane for part in resolved.parts if part.shape.dtype in _BITS8]
    is_record = bool(resolved.parts) and not resolved.has_separate_planes
    if found and is_record and len(raw) == 1:  # the only bytes of a record that have no dtype
        found[raw[0]] = found[""]
    return found


def format_of(dtype: str, wanted: str) -> str:
    """The dtype of an array if it says more than the expected one, else an empty text."""
    name = SPELLINGS.get(dtype, dtype)
    return "" if name == wanted or name in _BITS8 or name in stand_ins(wanted) else name


#: What to do with two formats.
ONE_FORMAT = "a copy converts no dtype: to copy the bits, pass .view(torch.uint8) (in NumPy .view('uint8')) of one of them"


def require_one_format(title: str, src: Mapping[str, str], dst: Mapping[str, str], planes: Container[str] | None = None) -> None:
    """Raise `DTypeError` if the formats of two sides (`formats_of`) differ in a plane."""
    for plane in src.keys() & dst.keys():
        if src[plane] != dst[plane] and (planes is None or not plane or plane in planes):
            raise DTypeError(
                f"{title}: {_of_plane(plane)}the source's arrays are {src[plane]}, the destination's {dst[plane]}; {ONE_FORMAT}"
            )


def require_declared(title: str, side: str, formats: Mapping[str, str], declared: Mapping[str, str]) -> None:
    """Raise `DTypeError` if arrays of planes that are cast have another format (`formats_of`) than their declared one."""
    for plane, dtype in declared.items():
        found = formats.get(plane, dtype)
        if found != dtype:
            raise DTypeError(
                f"{title}: cast: {f'plane {plane!r} of ' if plane else ''}the {side} is declared as {dtype}, and its arrays are "
                f"{found}; bind them with a layout or shape of that dtype"
            )


#: The formats of arrays (`formats_of`), and the dtype of every plane.
Formats = tuple[Mapping[str, str], Mapping[str, str]]


def require_formats(title: str, src: Formats, dst: Formats, *, casts: bool) -> None:
    """Check that the arrays' own dtypes do not contradict: no plane is copied into another format, or cast from another one."""
    (ours, here), (theirs, there) = src, dst
    if not casts:
        require_one_format(title, ours, theirs, here)
        return
    copied = {plane for plane in here.keys() & there.keys() if here[plane] == there[plane]}
    require_one_format(title, ours, theirs, copied)
    for formats, dtypes, where in ((ours, here, "source"), (theirs, there, "destination")):
        require_declared(title, where, formats, {plane: dtype for plane, dtype in dtypes.items() if plane not in copied})


def _of_plane(plane: str) -> str:
    return f"plane '{plane}': " if plane else ""


def _width(dtype: str) -> int:
    return 1 if dtype.startswith(("float8_", "float4_", "void8")) else ITEMSIZE.get(dtype, 0)


def wrong_rank(seen: Array, kind: Kind) -> str:
    """A message about an array with another number of axes than its kind, which has any number of blocks."""
    part = seen._replace(shape=seen.shape[1:], strides=seen.strides[1:])
    is_list = len(part.shape) == len(kind.shape) and part.shape == _with_blocks(kind, part).shape
    exact = _with_blocks(kind, part if is_list else seen)
    sizes = [str(n) for n in exact.shape]
    if exact is kind and "b" in kind.axes:
        sizes[kind.axes.index("b")] = "blocks"
    kind = exact
    advice = f"if it is {seen.shape[0]} arrays in one, pass list(array)" if is_list else _reshape(seen, kind)
    wanted = f"{len(kind.shape)} axes ({' '.join(kind.axes)}) of ({', '.join(sizes)})"
    return f"expected {wanted}, got shape {_tuple(seen.shape)}; {advice}"
def _with_blocks(kind: Kind, seen: Array) -> Kind:
    """The kind with as many blocks as an array with other axes holds.  Unchanged if that is not a whole number."""
    if (
        "b" not in kind.axes
        or not all(type(n) is int for n in (*seen.shape, *kind.shape))
        or kind.strides != dense(kind.shape, kind.itemsize)
    ):
        return kind
    at = kind.axes.index("b")
    blocks, rest = divmod(math.prod(seen.shape), math.prod(kind.shape[:at] + kind.shape[at + 1 :]))
    if rest or not blocks:
        return kind
    shape = (*kind.shape[:at], blocks, *kind.shape[at + 1 :])
    return kind._replace(shape=shape, strides=dense(shape, kind.itemsize))


def _reshape(seen: Array, kind: Kind) -> str:
    """What to do with an array of another shape than its kind."""
    if not all(type(n) is int for n in (*seen.shape, *seen.strides, *kind.shape)):
        return "check the shape"
    count = math.prod(kind.shape)
    runs = loops_of(seen.shape, seen.strides)
    turned = _turned(seen, kind)
    if turned:
        strides = tuple(seen.strides[axis] for axis in turned)
        order, mine = (
            ", ".join(map(str, turned)),
            " ".join(kind.axes[turned.index(axis)] for axis in range(len(turned))),
        )
        if all(a == b for n, a, b in zip(kind.shape, strides, kind.strides, strict=True) if n > 1):
            return f"if its axes are {mine}, pass array.permute({order}), or .transpose({order}) of NumPy"
        return f"if its axes are {mine}, use a layout with its order: `kvbm.match` lists those that fit, `kvbm.declare` writes one"
    # Of an array that is not contiguous, .reshape would make a copy.
    if math.prod(seen.shape) == count and runs in ([], [(count, ITEMSIZE.get(seen.dtype, 0))]):
        return f"if its elements are in that order, call .reshape({', '.join(map(str, kind.shape))})"
    return "check the shape"


def _turned(seen: Array, kind: Kind) -> tuple[int, ...]:
    """For each axis of a kind, the axis of the array with its size, if the sizes tell; else empty.

    Axes of one size count as they come.
    """
    left, found = list(range(len(seen.shape))), []
    for size in kind.shape:
        axis = next((axis for axis in left if seen.shape[axis] == size), None)
        if axis is None:
            return ()
        left.remove(axis)
        found.append(axis)
    return () if left or found == sorted(found) else tuple(found)


def _tuple(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))})"


# ---- required forms of a layout's arrays ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def numbers_of_blocks(layout: Layout, shape: BlockShape, nbytes: int) -> range:
    """The numbers of blocks with which the first allocation of a layout has this many bytes, padding included.

    They are several if a pitch of an axis outside of `b` leaves room behind the blocks; none if no number fits.
    """

    def size(blocks: int) -> int:
        found = legal(layout, shape, blocks)
        return LIMIT if found is None else found.first.nbytes  # None: the pitch has room for fewer blocks

    above = 1
    while size(above) <= nbytes:
        above *= 2
    found = range(1, above)
    return found[bisect_left(found, nbytes, key=size) : bisect_right(found, nbytes, key=size)]


def one_number(title: str, numbers: range, way: str) -> int | None:
    """The only number of blocks; None if no number fits.  Raises `BindError` if several do."""
    if len(numbers) > 1:
        listed = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 2 else f"{numbers[0]} and {numbers[1]}"
        raise BindError(
            f"{title}: the array does not show its number of blocks: {listed} fit, as the layout's pitch leaves room behind the "
            f"blocks; {way}"
        )
    return numbers[0] if numbers else None


class Side:
    """A layout and a block shape: the required arrays for any number of blocks."""

    def __init__(self, layout: Layout, shape: BlockShape) -> None:
        self.layout, self.shape = layout, shape
        one = layout.resolve(shape, 1)
        self.arrays_a_block = one.table_size if layout.b_in_table else 0
        self.count = one.table_size
        self._one = one.first
        self._sized: dict[int, Sized] = {}

    def __str__(self) -> str:
        return f"{self.layout.name} ({self.layout.order_text})"

    def blocks(self, who: Caller, shapes: Sequence[Sequence[int]]) -> Size:
        """The number of blocks that a list of arrays holds, from its length or from the axis ``b`` of the first array."""
        if self.arrays_a_block:
            blocks, rest = divmod(len(shapes), self.arrays_a_block)
            if rest:
                raise BindError(
                    f"{who.operator}: {who.argument}s: {self} expects {self.arrays_a_block} arrays per block, so a multiple of "
                    f"that, got {len(shapes)}"
                )
            return blocks
        if len(shapes) != self.count:
            raise BindError(f"{who.operator}: {who.argument}s: {self} expects {self.count} arrays, got {len(shapes)}")
        axes, first = self._one.axes, shapes[0]
        any_shape = self._one.is_record and "b" in axes and axes.index("b") < len(first)
        if len(first) != len(axes) and not any_shape:
            sizes = zip(axes, self._one.shape, strict=True)
            expected = ", ".join("blocks" if axis == "b" else str(n) for axis, n in sizes)
            raise BindError(
                f"{who(0)}: expected {len(axes)} axes ({' '.join(axes)}) of ({expected}), got shape {_tuple(tuple(first))}; "
                "check the shape; .reshape(…) of a contiguous array changes it without a copy"
            )
        known = all(type(n) is int for n in first)  # not symbols of a compiler
        items: int = math.prod(int(n) for n in first) if known else 0
        blocks = first[axes.index("b")] if "b" in axes else 0
        if known and (blocks == 0 or (any_shape and not self._is_exact(first, blocks))) and items:
            numbers = numbers_of_blocks(self.layout, self.shape, items * self._one.itemsize)
            use = "bind it with kvbm.Pool(…, num_blocks=…), and copy with kvbm.convert"
            if (number := one_number(who(0), numbers, use)) is not None:
                return number
        if "b" in axes:
            return blocks
        blocks, rest = divmod(first[0], self._one.shape[0])
        if rest:
            raise BindError(f"{who(0)}: expected a multiple of the {self._one.shape[0]} elements of a block, got {first[0]}")
        return blocks

    def _is_exact(self, shape: Sequence[int], blocks: int) -> bool:
        """True if an array of records has exactly the shape that the layout gives for this number of blocks."""
        found = legal(self.layout, self.shape, blocks)
        return found is not None and tuple(shape) == found.first.shape

    def sized(self, num_blocks: Size) -> Sized:
        """The required arrays for this number of blocks; cached.  The number may be 0, or a compiler's symbol."""
        if not isinstance(num_blocks, int):
            return self._made(num_blocks)
        found = self._sized.get(num_blocks)
        if found is None:
            if len(self._sized) > 1024:
                self._sized.clear()
            found = self._sized[num_blocks] = self._made(num_blocks)
        return found

    def _made(self, blocks: Size) -> Sized:
        count = blocks * self.arrays_a_block if self.arrays_a_block else self.count
        if isinstance(blocks, int) and blocks > 0:
            kinds = self._kinds(blocks)
        else:  # extents and strides are linear in the number of blocks, unless there is a pitch
            samples = [self._kinds(n) for n in (2, 3, 7)]
            lines = [self._line(blocks, *numbers) for numbers in zip(*map(_numbers, samples), strict=True)]
            if None in lines:
                return self._made(int(blocks) or 1)
            kinds = _with_numbers(samples[0], lines)
        which = None
        if len(kinds) > 1:
            which = bytes(
                self.layout.resolve(self.shape, max(int(blocks), 1) if self.arrays_a_block else 1).kind_of_entry
            )
        return Sized(self, blocks, count, kinds, which)

    def _kinds(self, blocks: int) -> tuple[Kind, ...]:
        return kinds_of(self.layout.resolve(self.shape, blocks))

    @staticmethod
    def _line(blocks: Any, at_2: int, at_3: int, at_7: int) -> Any:
        step = at_3 - at_2
        if at_7 != at_2 + 5 * step:
            return None
        return at_2 if step == 0 else at_2 - 2 * step + step * blocks


def kinds_of(resolved: Resolved) -> tuple[Kind, ...]:
    """The required forms of a layout's arrays at given sizes.  `Resolved.kind_of_entry` gives the kind of each table entry."""
    own = bool(resolved.layout.planes)
    return tuple(
        Kind(
            one.axes, one.shape, one.strides, one.itemsize, one.dtype if own else "", one.nbytes if one.is_record else 0
        )
        for one in resolved.kinds
    )


def _numbers(kinds: tuple[Kind, ...]) -> list[int]:
    return [number for kind in kinds for number in (*kind.shape, *kind.strides, kind.whole)]


def _with_numbers(kinds: tuple[Kind, ...], numbers: list[Any]) -> tuple[Kind, ...]:
    made, rest = [], iter(numbers)
    for kind in kinds:
        shape = tuple(next(rest) for _ in kind.shape)
        made.append(kind._replace(shape=shape, strides=tuple(next(rest) for _ in kind.strides), whole=next(rest)))
    return tuple(made)


def block_shape(text: str, dtype: str) -> BlockShape:
    """The shape of a text.  Raises `SpecError` for another object."""
    require_a(str, "shape", text, "a BlockShape or its text", SpecError)
    return _block_shape(text, dtype)


def _has_no_dtype(text: str) -> bool:
    """True for a text of sizes only; a preset has a dtype."""
    return "=" in text.partition(",")[0] and "dtype=" not in text


@functools.lru_cache(maxsize=1024)
def _block_shape(text: str, dtype: str) -> BlockShape:
    """The shape of a text.  A text of sizes only (``nl=2,no=2,…``) gets the given dtype."""
    if _has_no_dtype(text):
        if dtype not in ITEMSIZE:
            raise DTypeError(
                f"shape {text!r} names no dtype, and a block cannot have the dtype {dtype} of the arrays; pass views of "
                "integers, such as .view(torch.int64), .view(numpy.int64); for several integers an element, multiply hd"
            )
        text += f",dtype={dtype}"
    return load_shape(text)


def require_copy(src: Side, dst: Side, cast: Scale | None = None) -> None:
    """Raise the planner's error if there is no copy between two layouts, before dtypes are compared."""
    plan(src.layout, dst.layout, (src.shape, dst.shape), num_blocks=(1, 1), cast=cast)


@functools.lru_cache(maxsize=1024)
def side_of(layout: str, shape: BlockShape) -> Side:
    """A side, for a layout's name or the path of its file.  The file is read once per process."""
    return Side(load(layout), shape)


def sides_of(src: str, dst: str, text: str, found: str, out: str | None, cast: Scale | None) -> tuple[Side, Side]:
    """Both sides of a call, by names of layouts or paths of their files, and a text of the sizes of a block.

    `found` is the dtype of the first array of the source, or of the destination if the source has none; `out` that of the first
    array of the destination, None if its arrays are made.  Without a `cast` both sides have one block shape.  With it, arrays
    of a layout without planes have their own dtype, and the text names that of the others.

    Raises `SpecError` if there is no such layout or shape, or nothing says of which dtype the new arrays of a cast are;
    `DTypeError` if, with a cast into given arrays, one is int8 and the text names another format of one byte.
    """
    shape = block_shape(text, found)
    sides = side_of(src, shape), side_of(dst, shape)
    if cast is None:
        return sides
    if out is None and _has_no_dtype(text):
        raise SpecError(
            f"shape {text!r} names no dtype, and a cast makes values of another one; pass '{text},dtype=bfloat16', or another"
        )
    shapes = []
    for what, side, own in zip(("input", "output"), sides, (found, out), strict=True):
        # The shape of new arrays is that of the result; else it says what the arrays hold that do not say it.
        known = None if own is None or side.layout.planes else _own_dtype(what, own, shape.dtype, is_clear=out is None)
        shapes.append(shape if known is None else replace(shape, dtype=known))
    return side_of(src, shapes[0]), side_of(dst, shapes[1])


def _own_dtype(what: str, found: str, wanted: str, *, is_clear: bool) -> str:
    """The dtype of the values of an array: unsigned integers hold bits of the dtype that the caller names.

    int8 is a format of values and also holds bits.  Unless `is_clear`, a shape of another format of one byte is refused.
    """
    name = SPELLINGS.get(found, found)
    if name not in stand_ins(wanted):
        return name
    if name == "int8" and not is_clear:
        raise DTypeError(
            f"{what} #0 is int8, and the shape says {wanted}: expected one format; for values of int8 give a shape of int8, for "
            f"bits of {wanted} view the array as {wanted}, or as uint8"
        )
    return name if name == "int8" else wanted


def layout_name(what: str, layout: Any) -> str:
    """A layout as operators accept it: a name, or the path of a file.

    Operators of PyTorch accept only strings, so a `Layout` must have been loaded from a file.
    """
    if isinstance(layout, str):
        return layout
    if hasattr(layout, "__fspath__"):
        return str(layout)
    if not isinstance(layout, Layout):
        raise SpecError(f"{what}: expected a Layout, a name or the path of a .yaml file, got {type(layout).__name__}")
    for name in (layout.name, layout.file):
        with contextlib.suppress(SpecError):
            if load(name) == layout:
                return name
    raise SpecError(
        f"{what}: {layout.name or layout.order_text}: this Layout was not loaded from a file; write it to a .yaml file, or use "
        "kvbm.Pool and kvbm.convert"
    )


def shape_text(what: str, shape: Any) -> str:
    """The text of a shape, for a text of `kvbm.load_shape` or a `BlockShape`."""
    if isinstance(shape, str):
        return shape
    if isinstance(shape, BlockShape):
        return str(shape)
    raise SpecError(f"{what}: expected a BlockShape or a text such as 'nl=2,no=2,nh=4,nt=16,hd=32', got {quoted(shape)}")


def named(operator: str, error: KvbmError) -> KvbmError:
    """The same error with the operator's name in front, unless it already has it."""
    text = str(error)
    if not text.startswith(f"{operator}: "):
        error.args = (f"{operator}: {text}", *error.args[1:])
    return error
