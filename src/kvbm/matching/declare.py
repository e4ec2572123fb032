"""Writes the layout of given arrays: `kvbm.declare`, and ``kvbm declare`` on the command line.

The caller names the axes, and shapes and strides give the rest: the order in memory, pitches, and the sizes of a block.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._arguments import quoted, require_a
from ..errors import BindError, DTypeError, KvbmError, LayoutError, SpecError
from ..layout.axes import OF_A_BLOCK, SIZE_OF
from ..layout.grammar import parse
from ..layout.layout import Layout
from ..layout.naming import SPELLINGS
from ..layout.shapes import ITEMSIZE, BlockShape, as_shape
from ..layout.terms import Order, Term
from ..memory.allocation import Arrays
from ..memory.array_checks import block_shape, require_dtype
from ..memory.array_info import Array, describe

#: A name of a layout: the path of its file without ``.yaml``.
_NAME = r"(?!.*\.\.)/?[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*"

def declare(tensors: Any, axes: str, *, shape: BlockShape | str | None = None, name: str = "mine") -> str:
    """The text of a layout file for some arrays, from the names of their axes.

    Parameters
    ----------
    tensors : array or sequence of arrays
        As for `Pool`: one array per allocation, in table order.  Only their shapes, strides and dtypes are read.
    axes : str
        The names of the axes, in their order in each array: ``"b h t d"``.  In brackets in front, the axes of the list:
        ``"[l o] b h t d"``.  Splits and fused axes are written as in a layout: ``"b h d/8 t d%8"``, ``"b t (h d)"``.
    shape : BlockShape or str, optional
        Sizes of a block.  Needed if the arrays do not show them: several axes are one axis of an array, or the list has several
        axes besides ``o``.
    name : str
        Name of the layout, for the comment: ``name.yaml`` is the file that it names.

    Returns
    -------
    str
        YAML.  Its first lines are comments: what the arrays are, and Python that binds ``tensors`` (``tensor`` if there is one).
        The axes in the order are sorted by their strides; if the arrays have another order, the Python permutes them.

    Raises
    ------
    BindError
        The names do not fit the arrays, or no layout has them: the arrays are not alike, a stride is 0 or negative, elements share
        memory, or an axis of a split has another size than its name says.
    SpecError
        `axes` is not the text of an order, or the sizes of a block are not known.

    Examples
    --------
    >>> import numpy as np
    >>> print(declare([np.zeros((6, 4, 16, 8), "float16")] * 4, "[l o] b h t d"))
    # 4 arrays of shape (6, 4, 16, 8), float16; axes: [l o] b h t d
    # kvbm.Pool("mine.yaml", "nl=2,no=2,nh=4,nt=16,hd=8,dtype=float16", tensors)
    order: "[l o] b h t d"
    <BLANKLINE>
    >>> print(declare(np.zeros((6, 16, 4, 12), "float16")[..., :8].transpose(0, 2, 1, 3), "b h t d"))
    # 1 array of shape (6, 4, 16, 8), strides (768, 12, 48, 1), float16; axes: b h t d
    # kvbm.Pool("mine.yaml", "nl=1,no=1,nh=4,nt=16,hd=8,dtype=float16", tensor.transpose(0, 2, 1, 3))
    order: "b t h d"
    pitch: {h: 12}
    <BLANKLINE>
    """
    arrays, numpy = described("declare", tensors)
    return declare_described(arrays, axes, shape, name, numpy=numpy)


def described(who: str, tensors: Any) -> tuple[list[Array], bool]:
    """The descriptions of the arrays that a caller gives, and True if all are NumPy's."""
    if isinstance(tensors, Mapping):
        tensors = list(tensors.values())
    given = list(tensors) if isinstance(tensors, list | tuple | Arrays) else [tensors]
    if not given:
        raise BindError(f"{who}: expected at least one array, got none")
    arrays = [describe(one, f"{who}: array {index}") for index, one in enumerate(given)]
    return arrays, all(isinstance(one, np.ndarray) for one in given)


def declare_described(
    arrays: Sequence[Array], axes: str, shape: BlockShape | str | None = None, name: str = "mine", *, numpy: bool = False
) -> str:
    """`declare` for arrays that are already described.  The Python is for arrays of torch; with `numpy`, for those of NumPy."""
    require_a(str, "declare: axes", axes, "a text such as 'b h t d'", SpecError)
    require_a(str, "declare: name", name, "a text", SpecError)
    if not re.fullmatch(_NAME, name):
        raise SpecError(
            f"declare: name: expected letters, digits, '_', '-' and '.', with '/' between folders, such as mine or acme/pages, got "
            f"{quoted(name)}"
        )
    axes = " ".join(axes.split())  # a comment has one line
    first = _alike(arrays)
    _require_blocks_apart(axes, first)
    order = _order_of(axes)
    if len(order.inner) != len(first.shape):
        raise BindError(
            f"declare: axes {axes!r}: expected {len(first.shape)} names, one for each axis of the shape {first.shape}, got "
            f"{len(order.inner)}; axes of a list of arrays are in brackets in front"
        )
    if not order.table and len(arrays) > 1:
        raise BindError(
            f"declare: axes {axes!r}: expected brackets in front, with the axes of the list of {len(arrays)} arrays, such as "
            f"'[l] {axes}' for one array per layer"
        )
    sizes = _sizes_of_block(arrays, order, axes, shape)
    turned = _turned(first)
    terms = [order.inner[axis] for axis in turned]
    own = first._replace(
        shape=tuple(first.shape[axis] for axis in turned), strides=tuple(first.strides[axis] for axis in turned)
    )
    text = f'order: "{Order(order.table, tuple(terms))}"\n'
    if pitch := _pitches(terms, own, sizes):
        text += f"pitch: {{{', '.join(f'{term}: {value}' for term, value in pitch.items())}}}\n"
    count = _require_bound(parse(text, f"{name}.yaml", name), sizes, len(arrays), own, axes)
    views, turn = "tensor" if count == 1 else "tensors", ""
    if turned != sorted(turned):
        turn = f".{'transpose' if numpy else 'permute'}({', '.join(map(str, turned))})"
        views = f"tensor{turn}" if count == 1 else f"[one{turn} for one in tensors]"
    item, strides = ITEMSIZE[sizes.dtype], ""
    if pitch or turn:
        whole = not any(stride % item for stride in first.strides)
        strides = f", strides {tuple(one // item for one in first.strides) if whole else f'{first.strides} bytes'}"
    return (
        f"# {f'{count:,} arrays' if count > 1 else '1 array'} of shape {first.shape}{strides}, {first.dtype}; axes: {axes}\n"
        f'# kvbm.Pool("{name}.yaml", "{sizes}", {views})\n{text}'
    )


def possible_orders(arrays: Sequence[Array], shape: BlockShape, most: int = 8) -> list[str]:
    """The orders that arrays have by their sizes alone: each axis of an array is one axis of the block, or the blocks.

    Their list has at most one axis, or those of layers and of K and V.  At most `most` orders are listed.
    """
    try:
        first = _alike(arrays)
    except BindError:
        return []
    sizes = {axis: size for axis, size in shape.sizes.items() if size > 1}
    unused = [axis for axis in OF_A_BLOCK if axis not in sizes]
    found: list[str] = []
    tables: list[tuple[str, ...]] = [(), ("b",), *((axis,) for axis in sizes), ("l", "o"), ("o", "l")]
    for table in tables:
        count = math.prod(len(arrays) if axis == "b" else shape.sizes[axis] for axis in table)
        if len(arrays) != count or (table and count == 1):
            continue
        left = {axis: size for axis, size in sizes.items() if axis not in table}
        for names in _names(first.shape, left, unused, has_b="b" not in table):
            order = Order(tuple(Term((axis,)) for axis in table), tuple(Term((axis,)) for axis in names))
            try:
                declare_described(arrays, str(order), shape)
            except KvbmError:
                continue
            found.append(str(order))
            if len(found) == most:
                return found
    return found


def _names(extents: Sequence[int], sizes: Mapping[str, int], unused: Sequence[str], *, has_b: bool) -> Iterator[tuple[str, ...]]:
    """Every way to name axes of these extents: all axes of `sizes`, the blocks, and unused axes where the extent is 1."""
    if not extents:
        if not sizes and not has_b:
            yield ()
        return
    first, *rest = extents
    for axis, size in sizes.items():
        if size == first:
            others = {other: n for other, n in sizes.items() if other != axis}
            yield from ((axis, *names) for names in _names(rest, others, unused, has_b=has_b))
    if first == 1 and unused:
        yield from ((unused[0], *names) for names in _names(rest, sizes, unused[1:], has_b=has_b))
    if has_b:
        yield from (("b", *names) for names in _names(rest, sizes, unused, has_b=False))


def _alike(arrays: Sequence[Array]) -> Array:
    """The first array.  Raises `BindError` unless all are like it, and a layout may have it."""
    first = arrays[0]
    for index, one in enumerate(arrays):
        if (one.shape, one.strides, one.dtype) != (first.shape, first.strides, first.dtype):
            raise BindError(
                f"declare: array {index} has the shape {one.shape}, strides of {one.strides} bytes and {one.dtype}, array 0 "
                f"{first.shape}, {first.strides} and {first.dtype}; expected arrays that are alike: a layout where K and V differ, "
                "or with planes, is written by hand"
            )
    for axis, (extent, stride) in enumerate(zip(first.shape, first.strides, strict=True)):
        if extent == 0:
            raise BindError(f"declare: array 0 is empty: axis {axis} of the shape {first.shape} is 0; expected at least 1")
        if extent > 1 and stride <= 0:
            why = "all of its items are in one place" if stride == 0 else "it is a reversed view"
            raise BindError(
                f"declare: array 0: axis {axis} of {extent} has a stride of {stride} bytes: {why}, and no layout has strides below "
                "1; pass the array that it is a view of"
            )
    return first


def _require_blocks_apart(axes: str, array: Array) -> None:
    """Raise `SpecError` if one axis has the tokens of all blocks: blocks need an axis of their own."""
    table, inner = re.fullmatch(r"\s*(\[[^\]]*\])?(.*)", axes, re.DOTALL).groups()  # type: ignore[union-attr]
    terms = re.findall(r"\([^)]*\)|\S+", inner)
    letters = [term.strip("()").split() for term in terms]
    joined = [["b", "t"]] if ["b", "t"] in letters else [["t"]]
    if joined[0] not in letters or (joined == [["t"]] and re.search(r"\bb\b", axes)) or len(terms) != len(array.shape):
        return
    at = letters.index(joined[0])
    extents = [*map(str, array.shape[:at]), "blocks", "tokens", *map(str, array.shape[at + 1 :])]
    named = " ".join([*([table] if table else []), *terms[:at], "b t", *terms[at + 1 :]])
    raise SpecError(
        f"declare: axes {axes!r}: axis 'b' (block): expected an axis of its own, got '{terms[at]}'. If the {array.shape[at]:,} "
        f"items of '{terms[at]}' are the tokens of all blocks, pass .reshape({', '.join(extents)}) of the arrays, which on the "
        f"command line is the shape {','.join(extents)}, with the axes '{named}'"
    )


def _order_of(axes: str) -> Order:
    """The order with these terms, as they are written."""
    if not axes.strip():
        raise SpecError("declare: axes: expected a name for each axis of an array, such as 'b h t d', got none")
    try:
        [order] = parse(f"order: {json.dumps(axes)}", "axes").orders
    except SpecError as error:
        text = re.sub("^axes:1: order", "axes", str(error))
        text = text.replace("declare others under 'axes:'", "write a layout with other axes by hand, with them under 'axes:'")
        raise SpecError(f"declare: {text}") from None
    except KvbmError as error:
        raise SpecError(f"declare: axes {quoted(axes)}: {error}") from None
    return order


def _sizes_of_block(arrays: Sequence[Array], order: Order, axes: str, shape: BlockShape | str | None) -> BlockShape:
    """The sizes of a block: those given, or those that the arrays show."""
    first = arrays[0]
    dtype = SPELLINGS.get(first.dtype, first.dtype)
    if shape is not None:
        found = block_shape(shape, first.dtype) if type(shape) is str else as_shape(shape)
        require_dtype("declare: array 0", first.dtype, found.dtype)
        return found
    if dtype not in ITEMSIZE:
        raise DTypeError(f"declare: array 0 is {dtype}, which no block holds; pass a view of integers, such as array.view('uint8')")
    extents = dict(zip(order.inner, first.shape, strict=True))
    unknown = list(order.table)
    if len(unknown) > 1 and (both := Term(("o",))) in unknown:
        extents[both] = 2
        unknown.remove(both)
    if len(unknown) == 1:
        known = math.prod(extents[term] for term in order.table if term in extents)
        extents[unknown[0]], rest = divmod(len(arrays), known)
        if rest:
            raise BindError(f"declare: axes {axes!r}: expected a multiple of {known} arrays (K and V), got {len(arrays)}")
    unclear = [str(term) for term in order.terms if term not in extents or len(term.axes) > 1]
    if unclear:
        raise SpecError(
            f"declare: axes {axes!r}: the arrays do not show the sizes of {', '.join(unclear)}: give the sizes of a block, such as "
            "shape='nl=2,no=2,nh=4,nt=16,hd=128'"
        )
    sizes, least = dict.fromkeys(OF_A_BLOCK, 1), dict.fromkeys(OF_A_BLOCK, 1)
    for term, extent in extents.items():
        for axis in term.axes:
            if axis in sizes:
                sizes[axis] *= extent
                # Of d/8 without d%8, for the message that names the missing piece.
                divisor = math.prod(n for op, n, in_bytes in term.steps if op == "/" and not in_bytes)
                least[axis] = max(least[axis], extent * divisor)
    sizes = {axis: max(size, least[axis]) for axis, size in sizes.items()}
    return BlockShape(**{SIZE_OF[axis]: size for axis, size in sizes.items()}, dtype=dtype)


def _turned(array: Array) -> list[int]:
    """The axes of an array, slowest first.  Axes of one item stay where they are."""
    axes = [axis for axis, extent in enumerate(array.shape) if extent > 1]
    lie = iter(sorted(axes, key=lambda axis: -array.strides[axis]))
    return [next(lie) if extent > 1 else axis for axis, extent in enumerate(array.shape)]


def _pitches(terms: Sequence[Term], array: Array, sizes: BlockShape) -> dict[str, str]:
    """Key → value in YAML, for each term that needs a pitch; slowest first."""
    held, found, item = sizes.itemsize, dict[str, str](), sizes.itemsize
    for term, extent, stride in reversed(list(zip(terms, array.shape, array.strides, strict=True))):
        if extent == 1:
            continue
        if stride < held:
            raise BindError(
                f"declare: array 0: elements share memory: expected a stride of at least {held} bytes along '{term}', got {stride}"
            )
        if stride > held:
            text = str(term)
            key = text if re.fullmatch(r"[A-Za-z]([/%][0-9]+B?)*", text) else json.dumps(text)
            found[key] = str(stride // item) if stride % item == 0 and sizes.pack == 1 else f"{stride} B"
        held = stride * extent
    return dict(reversed(found.items()))


def _require_bound(layout: Layout, sizes: BlockShape, count: int, array: Array, axes: str) -> int:
    """The number of arrays.  Raises `BindError` unless the layout has exactly these arrays at these sizes."""
    start = f"declare: axes {axes!r}"
    try:
        one = layout.resolve(sizes, 1)
        if layout.b_in_table:
            blocks = count // one.table_size or 1
        else:
            blocks = array.shape[[str(term) for term in layout.orders[0].inner].index("b")]
        resolved = layout.resolve(sizes, blocks)
    except LayoutError as error:
        raise BindError(f"{start}: {re.sub('^[^:]*:[0-9]+: ', '', str(error))}") from None
    if resolved.table_size != count:
        wanted = f"a multiple of {one.table_size}" if layout.b_in_table else str(resolved.table_size)
        raise BindError(f"{start}: expected {wanted} arrays, got {count} (at {sizes})")
    kind = resolved.first
    for axis, wanted_extent, extent in zip(kind.axes, kind.shape, array.shape, strict=True):
        if wanted_extent != extent:
            raise BindError(f"{start}: '{axis}': expected {wanted_extent} items, got {extent} (at {sizes})")
    return count
