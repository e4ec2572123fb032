"""The contract at the border: what the arrays of a pool or of a call must be, gate by gate, before anything touches them.

Read `GATES` as a list: each gate lets an array pass, or raises one sentence that names the operator, the argument, what was
expected, what was found, and the remedy.  No framework is imported here, and none is needed to try a gate.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .arrays import Array, dense, other_order, same_dtype, span, stand_ins
from .errors import BindError, DTypeError, KvbmError, SpecError
from .layout import Layout
from .planner import plan
from .resolved import Resolved
from .shapes import ITEMSIZE, BlockShape, load_shape
from .spans import merge_steps
from .spec import load

__all__ = [
    "ALIKE",
    "GATES",
    "Caller",
    "Kind",
    "Side",
    "Sized",
    "block_shape",
    "kinds_of",
    "named",
    "reads_as",
    "require",
    "require_each",
    "side_of",
]

#: Integers that any other dtype of one byte may be read as, and the other way round: the bits stay where they are.
_BITS8 = ("uint8", "int8", "void8")


class Kind(NamedTuple):
    """What an array of a layout must be: its axes, how many items along each, bytes between neighbours.

    `dtype` is empty where it is the shape's, and that of an item in layouts of several planes, each of which has its own.
    Where planes share an array, `whole` is its bytes with all padding: any shape of these, in their order, serves.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str = ""
    whole: int = 0


#: A number of blocks: an int, or a compiler's symbol of one.
Size = Any


class Sized(NamedTuple):
    """One side of a copy with its number of blocks: how many arrays, and what each must be."""

    side: Side
    num_blocks: Size
    arrays: int
    kinds: tuple[Kind, ...]
    which: bytes | None

    def kind(self, index: int) -> Kind:
        return self.kinds[self.which[index] if self.which else 0]

    def elements(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], str, int], ...]:
        """Shape and strides in items of each kind, as torch counts them, its dtype, and `Kind.whole`."""
        found = []
        for kind in self.kinds:
            if any(stride % kind.itemsize for stride in kind.strides if type(stride) is int):
                raise BindError(
                    f"{self.side.layout.name}: strides of {kind.strides} bytes are no whole numbers of "
                    f"{kind.dtype or self.side.shape.dtype}; such a pitch is for kvbm.Pool"
                )
            found.append(
                (kind.shape, tuple(stride // kind.itemsize for stride in kind.strides), kind.dtype, kind.whole)
            )
        return tuple(found)

    @property
    def nbytes(self) -> int:
        """Bytes from the first to behind the last item of the largest array."""
        return max(span(kind.shape, kind.strides, kind.itemsize) for kind in self.kinds)


class Caller(NamedTuple):
    """Who is refused, and in which words: ``convert``, ``input``, ``#``, and how its framework makes an array contiguous.

    `label` is what a layout calls an array, such as ``l=3``.
    """

    operator: str
    argument: str
    contiguous: str = ".contiguous()"
    mark: str = "#"
    label: Callable[[int], str] = lambda _: ""

    def __call__(self, index: int) -> str:
        label = self.label(index)
        return f"{self.operator}: {self.argument} {self.mark}{index}{f' ({label})' if label else ''}"


# ---- the gates -----------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """One array at the border, the first of its list, and what it must be."""

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
    """All arrays lie on one device ordinal."""
    if at.seen.device != at.first.device:  # names are made where they are said
        require_device(at.name, at.seen.device, f"{at.who.argument} {at.who.mark}0", at.first.device)


def of_one_dtype(at: Look) -> None:
    """All arrays of a list have one dtype, unless planes have their own."""
    if not at.kind.dtype and at.seen.dtype != at.first.dtype:
        raise DTypeError(
            f"{at.name} is {at.seen.dtype}, {at.who.argument} {at.who.mark}0 {at.first.dtype}; expected one dtype for all"
        )


def holds_the_dtype(at: Look) -> None:
    """The dtype is the shape's, or the plane's, or its bits can be read as these."""
    if reads_as(at.seen.dtype, at.kind.dtype or at.shape.dtype):
        return
    if at.kind.whole:
        raise DTypeError(
            f"{at.name}: its planes share it, so expected bytes (uint8, or another dtype of one byte), got {at.seen.dtype}; pass "
            ".view(torch.uint8)"
        )
    why = "the layout's planes say" if at.kind.dtype else "the shape says"
    require_dtype(at.name, at.seen.dtype, at.kind.dtype or at.shape.dtype, why)


def of_the_bytes(at: Look) -> None:
    """Records are bytes in any shape, with or without the padding."""
    seen, kind = at.seen, at.kind
    if not kind.whole or (seen.shape == kind.shape and _steps_alike(at)):
        return
    dense_or_not = (merge_steps(kind.shape, kind.strides), [(kind.whole, 1)])
    if merge_steps(seen.shape, seen.strides) not in dense_or_not:
        padded = f", or dense, {kind.whole} bytes with the padding" if kind.whole != math.prod(kind.shape) else ""
        raise BindError(
            f"{at.name}: expected bytes of shape {_tuple(kind.shape)} ({' '.join(kind.axes)}) and strides {_tuple(kind.strides)}, "
            f"or another shape of the same bytes{padded}; got shape {_tuple(seen.shape)} and strides of {_tuple(seen.strides)} "
            "bytes"
        )


def of_the_rank(at: Look) -> None:
    """As many axes as the layout has."""
    if len(at.seen.shape) != len(at.kind.shape) and not at.kind.whole:
        raise BindError(
            f"{at.name}: expected {len(at.kind.shape)} axes ({' '.join(at.kind.axes)}) of {_tuple(at.kind.shape)}, got shape "
            f"{_tuple(at.seen.shape)}; {_reshape(at.seen, at.kind)}"
        )


def of_the_shape(at: Look) -> None:
    """As many elements along each axis."""
    for axis, want, got in zip(at.kind.axes, at.kind.shape, at.seen.shape, strict=False):
        if want != got and not at.kind.whole:
            raise BindError(
                f"{at.name}: axis '{axis}': expected {want}, got {got} (shape {_tuple(at.seen.shape)}, expected "
                f"{_tuple(at.kind.shape)}); {_reshape(at.seen, at.kind)}"
            )


def of_the_strides(at: Look) -> None:
    """Neighbours as far apart as the layout has them: contiguous, unless it declares a pitch."""
    seen, kind = at.seen, at.kind
    if kind.whole or _steps_alike(at):
        return
    where = f" at storage offset {seen.offset}" if seen.offset else ""
    if kind.strides == dense(kind.shape, kind.itemsize):
        advice = f"call {at.who.contiguous}" if at.who.argument == "input" else other_order(kind.axes, seen.strides)
        raise BindError(
            f"{at.name}: expected a contiguous array, got strides of {_tuple(seen.strides)} bytes{where}, a slice or a "
            f"transpose of another; {advice}"
        )
    raise BindError(
        f"{at.name}: expected strides of {_tuple(kind.strides)} bytes, the layout's pitch, got {_tuple(seen.strides)}{where}; "
        "allocate it with those strides (torch.empty_strided), or use a layout without a pitch"
    )


def _steps_alike(at: Look) -> bool:
    """Whether an array of the kind's shape has its strides, or nothing is stepped through."""
    seen, kind = at.seen, at.kind
    return all(a == b or n == 1 for n, a, b in zip(seen.shape, seen.strides, kind.strides, strict=False)) or any(
        type(n) is int and n == 0 for n in seen.shape
    )


#: What the arrays of a list have in common.
ALIKE: tuple[Callable[[Look], None], ...] = (on_one_device, of_one_dtype, holds_the_dtype)

#: What every array of a list must pass, in this order.
GATES: tuple[Callable[[Look], None], ...] = (*ALIKE, of_the_bytes, of_the_rank, of_the_shape, of_the_strides)


def require(who: Caller, seen: Sequence[Array], sized: Sized) -> None:
    """Let a list of arrays through all gates, or say what is wrong with the first that fails."""
    if len(seen) != sized.arrays:
        raise BindError(
            f"{who.operator}: {who.argument}s: {sized.side} holds {sized.num_blocks} blocks in {sized.arrays} arrays, got "
            f"{len(seen)}"
        )
    require_each(who, seen, sized.kinds, sized.which, sized.side.shape)


def require_each(
    who: Caller,
    seen: Sequence[Array],
    kinds: Sequence[Kind],
    which: Sequence[int] | None,
    shape: BlockShape,
    gates: Sequence[Callable[[Look], None]] = GATES,
) -> None:
    """Let arrays through gates, one array after the other; each is of ``kinds[which[index]]``, or of the only kind."""
    passed: dict[int, Array] = {}  # the last of each kind: one that looks the same passes, too
    for index, array in enumerate(seen):
        kind = which[index] if which else 0
        if kind in passed and passed[kind][1:5] == array[1:5]:  # shape, strides, dtype, device
            continue
        look = Look(who, index, array, seen[0], kinds[kind], shape)
        for gate in gates:
            gate(look)
        passed[kind] = array


def require_writable(who: Caller, seen: Sequence[Array]) -> None:
    """Destinations may be written."""
    for index, array in enumerate(seen):
        if array.readonly:
            raise BindError(f"{who(index)} is read-only; expected one that may be written: pass a copy of it")


def require_device(one: str, device: str, other: str, expected: str) -> None:
    """Two things lie on one device: else both are named, and what to construct instead."""
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
    """A dtype that is the one wanted, or whose bits can be read as that."""
    if reads_as(found, wanted):
        return
    of_the_shape = why == "the shape says"
    if _width(found) == _width(wanted) == 1:
        also = ", or dtype=uint8 in shape" if of_the_shape else ""
        advice = f"two formats of one byte are only exchanged as bits: pass .view(torch.uint8) of it{also}"
    elif of_the_shape:
        advice = f"a copy converts no dtype: pass shape='…,dtype={found}', or convert the values before"
    else:
        advice = "a copy converts no dtype: convert the values before"
    bits = " or ".join(stand_ins(wanted)[:2])
    advice += f"; {bits} may hold the bits" if bits else ""
    raise DTypeError(f"{name}: expected {wanted}, as {why}, got {found}; {advice}")


def reads_as(found: str, wanted: str) -> bool:
    """Whether memory of dtype `found` can be taken for `wanted` as it is: equal, or a stand-in of the same width.

    Examples
    --------
    >>> reads_as("uint8", "float8_e4m3fn"), reads_as("float8_e5m2", "int8"), reads_as("float8_e5m2", "float8_e4m3fn")
    (True, True, False)
    """
    one_byte = _width(found) == _width(wanted) == 1
    return same_dtype(found, wanted) or (one_byte and (found in _BITS8 or wanted in _BITS8))


def _width(dtype: str) -> int:
    return 1 if dtype.startswith(("float8_", "float4_", "void8")) else ITEMSIZE.get(dtype, 0)


def _reshape(seen: Array, kind: Kind) -> str:
    same = all(isinstance(n, int) for n in (*seen.shape, *kind.shape)) and math.prod(seen.shape) == math.prod(
        kind.shape
    )
    if same:
        return f"if its elements lie in that order, call .reshape({', '.join(map(str, kind.shape))})"
    return "or is the shape another one?"


def _tuple(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))})"


# ---- what a layout expects -----------------------------------------------------------------------------------------


class Side:
    """A layout and a block shape: what is expected of the arrays of so many blocks."""

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
        """How many blocks a list of arrays holds, by its length or by the axis ``b`` of its first."""
        if self.arrays_a_block:
            blocks, rest = divmod(len(shapes), self.arrays_a_block)
            if rest:
                raise BindError(
                    f"{who.operator}: {who.argument}s: {self} expects {self.arrays_a_block} arrays a block, so a multiple of "
                    f"that, got {len(shapes)}"
                )
            return blocks
        if len(shapes) != self.count:
            raise BindError(f"{who.operator}: {who.argument}s: {self} expects {self.count} arrays, got {len(shapes)}")
        axes, first = self._one.axes, shapes[0]
        any_shape = self._one.is_record and "b" in axes and axes.index("b") < len(first)
        if len(first) != len(axes) and not any_shape:
            expected = ", ".join(
                "blocks" if axis == "b" else str(n) for axis, n in zip(axes, self._one.shape, strict=True)
            )
            raise BindError(
                f"{who(0)}: expected {len(axes)} axes ({' '.join(axes)}) of ({expected}), got shape {_tuple(tuple(first))}; "
                "call .reshape(…) if its elements lie in that order"
            )
        if "b" in axes:
            return first[axes.index("b")]
        blocks, rest = divmod(first[0], self._one.shape[0])
        if rest:
            raise BindError(
                f"{who(0)}: expected a multiple of {self._one.shape[0]} elements, which a block has, got {first[0]}"
            )
        return blocks

    def sized(self, num_blocks: Size) -> Sized:
        """With this number of blocks; kept for the next call.  It may be 0, or a symbol of a compiler."""
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
        else:  # extents and strides are linear in the number of blocks, unless a pitch makes them otherwise
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
    """What the arrays of a layout at given sizes must be; `Resolved.kind_of_entry` tells which of them is which."""
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


@functools.lru_cache(maxsize=1024)
def block_shape(text: str, dtype: str) -> BlockShape:
    """The shape of a text; one of sizes alone (``nl=2,no=2,…``) has the dtype that is given."""
    if "=" in text.partition(",")[0] and "dtype=" not in text:
        if dtype not in ITEMSIZE:
            raise DTypeError(
                f"shape {text!r} names no dtype, and {dtype} is none that a block may hold; add dtype=uint8"
            )
        text += f",dtype={dtype}"
    return load_shape(text)


def require_copy(src: Side, dst: Side) -> None:
    """There is a copy between two layouts: else the planner's own sentence, before dtypes are compared that cannot be."""
    plan(src.layout, dst.layout, src.shape, num_blocks=(1, 1))


@functools.lru_cache(maxsize=1024)
def side_of(layout: str, shape: BlockShape) -> Side:
    """A side by the layout's name or the path of its file, which is read once in a process."""
    return Side(load(layout), shape)


def layout_name(what: str, layout: Any) -> str:
    """A layout as operators take it: a name, or the path of a file."""
    if isinstance(layout, str):
        return layout
    if hasattr(layout, "__fspath__"):
        return str(layout)
    raise SpecError(
        f"{what}: expected the name of a layout or the path of a .yaml file, got {type(layout).__name__}; a Layout that "
        "is made in Python is for kvbm.Pool and kvbm.convert"
    )


def shape_text(what: str, shape: Any) -> str:
    """A shape as operators take it: a text of `kvbm.load_shape`, or a `BlockShape`."""
    if isinstance(shape, str):
        return shape
    if isinstance(shape, BlockShape):
        return str(shape)
    raise SpecError(f"{what}: expected a text such as 'nl=2,no=2,nh=4,nt=16,hd=32' or a BlockShape, got {shape!r}")


def named(operator: str, error: KvbmError) -> KvbmError:
    """The same error with the operator's name in front, if it is not there yet."""
    text = str(error)
    if not text.startswith(f"{operator}: "):
        error.args = (f"{operator}: {text}", *error.args[1:])
    return error
